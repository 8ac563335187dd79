"""The terminal's view of a run: `views` on a screen, with keys. It ends with `q`; the run continues."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.geometry import Size
from textual.widgets import Static

from slime_core.errors import SlimeError
from slime_core.report.rundir import RunDir
from slime_watch.follower import RunFollower
from slime_watch.views import SMALLEST, VIEWS, ViewPage, head, too_small

INTERVAL = 2.0  # seconds between looks
FOOT = "1 curves  2 samples  3 notes  4 times   ←→ page   ? keys   q quit"


class WatchTerminal(App[None]):
    """Follow one run. ``failure`` is what ended it, None where the user did.

    Example: WatchTerminal(RunDir.open(Path("runs/demo-0"))).run()
    """

    CSS = """
    Screen { layout: vertical; background: transparent; }
    #head { height: 2; }
    #body { height: 1fr; scrollbar-size: 1 1; background: transparent; }
    #text { height: auto; width: 100%; }
    #foot { height: 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        # before the scrolled part's own, and so in the order in which keys are pressed
        Binding(keys, action, priority=True)
        for keys, action in (
            ("1", "show('curves')"),
            ("2", "show('samples')"),
            ("3", "show('notes')"),
            ("4", "show('times')"),
            ("question_mark", "show('keys')"),
            ("a", "all_stages"),
            ("left,p", "turn(1)"),
            ("right,n", "turn(-1)"),
            ("q,ctrl+c", "quit"),
        )
    ]

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(ansi_color=True)
        self.follower = RunFollower(run_dir)
        self.shown, self.page, self.everything = "curves", 0, False
        self.failure: SlimeError | None = None
        self._body_size = Size(0, 0)  # of the terminal when the body was drawn

    def compose(self) -> ComposeResult:
        """Head, body, keys."""
        yield Static(id="head", markup=False)
        with VerticalScroll(id="body"):
            yield Static(id="text", markup=False)
        yield Static(FOOT, id="foot", markup=False)

    def on_mount(self) -> None:
        """Look at the run now, and again every two seconds."""
        self.look()
        self.set_interval(INTERVAL, self.look)

    def look(self) -> None:
        """Read what is new; end where the run directory is gone."""
        try:
            news = self.follower.look()
        except SlimeError as error:
            self.failure = error
            self.exit()
            return
        self.draw(body=news)

    def draw(self, *, body: bool = True) -> None:
        """Show the run as it was last read, at the size of the terminal; the ``body`` where it has changed."""
        width, height = self.size
        small = width < SMALLEST[0] or height < SMALLEST[1]
        top = too_small(width, height) if small else head(self.follower, width)
        self.query_one("#head", Static).update(top, layout=False)
        if not body and self.size == self._body_size:
            return
        self._body_size = self.size
        page = ViewPage(width=width - 1, height=height - 3, number=self.page, everything=self.everything)
        self.query_one("#text", Static).update("" if small else VIEWS[self.shown](self.follower, page))

    def on_resize(self, event: Resize) -> None:
        """Draw at the new size."""
        self.call_after_refresh(self.draw)

    def action_show(self, name: str) -> None:
        """Show another part of the run from its start."""
        self.shown, self.page = name, 0
        self.query_one("#body", VerticalScroll).scroll_home(animate=False)
        self.draw()

    def action_turn(self, pages: int) -> None:
        """Turn pages: of samples back in time, of curves the other way round."""
        self.page += pages if self.shown == "samples" else -pages
        self.draw()

    def action_all_stages(self) -> None:
        """Draw curves of the stage that runs, or of all stages."""
        self.everything = not self.everything
        self.draw()
