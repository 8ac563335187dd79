"""What stands where nothing is: an engine that refuses (`debug_train_only`), a trainer that does not train
(`debug_rollout_only`) and only hands out the weights that the run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slime_core.errors import EngineError, TrainerError
from slime_core.protocols import Ability, Engine, Role, Trainer
from slime_core.types import WeightUpdate
from slime_core.weights.fp8 import rollout_form

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.durable import FileMark
    from slime_core.threads import TorchThread
    from slime_core.types import Batch, Columns, Completion, GenerateRequest, Media, WeightRoute
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.transports.senders import Senders


class AbsentEngine(Engine):
    """Refuses whatever would need an engine; what an engine would only note it lets pass."""

    abilities: frozenset[Ability] = frozenset()
    version = -1
    epoch = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Refused."""
        self._refuse(f"request {request.id} asked it to generate")

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """Refused."""
        self._refuse("log-probs were requested")

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Nothing is under way."""
        return []

    async def load(self, update: WeightUpdate) -> None:
        """Refused: weights are not sent where nothing serves them."""
        self._refuse(f"version {update.version} was sent to it")

    async def fingerprints(self, adapters: Sequence[str] = ()) -> dict[str, str]:
        """It serves nothing."""
        return {}

    def _refuse(self, why: str) -> NoReturn:
        raise EngineError(
            "this run has no engine",
            code="ENG84",
            where="rollout.debug_train_only",
            why=f"debug_train_only trains on a dump, and {why}",
            fix="--no-debug-train-only",
        )


class IdleTrainer(Trainer):
    """Has the weights of the folder, or of the seed, and nothing that changes them; it has no state to keep.

    ``device`` is where transports that travel from memory to memory put what they send.
    """

    def __init__(
        self, config: Config, folder: ModelFolder, thread: TorchThread, *, device: str = "cpu", epoch: int = 0
    ) -> None:
        self._config, self._folder, self._thread = config, folder, thread
        self._device, self._epoch = device, epoch
        self._senders: Senders | None = None

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """Refused."""
        self._refuse("score")

    async def step(self, batch: Batch) -> dict[str, float]:
        """Refused."""
        self._refuse("step")

    async def verify(self, batch: Batch) -> dict[str, float]:
        """Refused."""
        self._refuse("verify")

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """The starting weights, built for this call and not kept: by the route, or as tensors where there is none."""
        return await self._thread.run(self._publish, version, route)

    def _publish(self, version: int, route: WeightRoute | None) -> WeightUpdate:
        model = self._folder.build_model(dtype="float32", seed=self._config.seed)
        from slime_core.trainers.fsdp.adapters import MergedWeights
        from slime_core.trainers.fsdp.publishing import check_names, rounded, sources_of, stored_buffers
        from slime_core.weights.folder_layout import FolderLayout

        layout = FolderLayout(model)
        form = rollout_form(self._config.rollout.rollout_quantization, self._folder.stored_in)
        if route is None:
            tensors = rounded(dict(model.state_dict()), form, layout.parts)
            return WeightUpdate(version=version, epoch=self._epoch, transport="tensors", tensors=tensors)
        import torch

        from slime_core.weights.transports.senders import Senders

        if self._senders is None:
            self._senders = Senders(torch.device(self._device), self._folder.path, self._config, form)
        named = dict(model.named_parameters()) | stored_buffers(model)
        sources = sources_of(MergedWeights(None, named), torch.device("cpu"), layout.parts)
        check_names(layout, sources, self._folder)
        update = self._senders.publish(sources, version, route)
        update.epoch = self._epoch
        return update

    async def saved(self) -> dict[str, FileMark]:
        """No file was written."""
        return {}

    async def fingerprint(self) -> str:
        """None is taken: nothing is trained."""
        return ""

    async def export(self, path: Path) -> None:
        """Refused: it would be the model that the run started from."""
        self._refuse("export")

    async def release(self, what: set[str]) -> None:
        """The buffers of transports go with the parameters; it holds nothing else."""
        if "parameters" in what and self._senders is not None:
            await self._thread.run(self._senders.drop)

    def _refuse(self, call: str) -> NoReturn:
        raise TrainerError(
            f"this run does not train, and {call} was called",
            where="rollout.debug_rollout_only",
            fix="--no-debug-rollout-only",
        )
