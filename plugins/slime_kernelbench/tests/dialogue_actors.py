"""Who plays in tests of dialogues: an engine that says what a script tells it, and a judge that knows its verdicts."""

from dataclasses import replace
from hashlib import sha256

from slime_core import Context, Group, Prompt, Sample, SamplingParams
from slime_core.config.schema import Config
from slime_kernelbench.dialogue.turns import Room
from slime_kernelbench.dialogue.words import load_words
from slime_kernelbench.options import Options
from slime_kernelbench.types import Case, Diagnostic, KernelProblem, Timing, Verdict

PROBLEM = KernelProblem(id="test/1/relu", name="relu", source="class Model: ...\n")
RIGHT = Verdict(status="correct", reached="correctness")
WRONG = Verdict(
    status="wrong",
    reached="correctness",
    cases=(Case(shapes="8x64", regime="normal", agrees=False, max_abs=0.53125, tolerance=1e-4, where=(3, 5)),),
)
BROKEN = Verdict(
    status="compile_error",
    reached="import",
    diagnostics=(Diagnostic(stage="import", kind="SyntaxError", message="invalid syntax", line=2, excerpt="x = = 1"),),
)
INFRA = Verdict(
    status="infra",
    reached="import",
    diagnostics=(Diagnostic(stage="import", kind="Fork", message="no process can be made"),),
)


class Known:
    """A judge that knows the verdict on each source, by a mark in it; it counts what it is asked."""

    def __init__(self, verdicts=(), otherwise=WRONG):
        self.verdicts, self.otherwise, self.asked, self.closed = dict(verdicts), otherwise, [], 0

    async def judge(self, source, problem):
        self.asked.append(source)
        found = next((verdict for mark, verdict in self.verdicts.items() if mark in source), self.otherwise)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return replace(found, source_hash=sha256(source.encode()).hexdigest())

    async def aclose(self):
        self.closed += 1


def timed(speedup):
    """A right answer that was measured."""
    times = {"candidate": 1.0, "candidate_ci": 0.0, "remeasured": 1.0, "eager": speedup, "compiled": None}
    timing = Timing(device="a GPU", floor=0.0, repeats=9, host_over_event=1.0, **times)
    return Verdict(status="correct", reached="speed", timing=timing)


def fenced(code):
    return f"Here.\n```python\n{code}\n```"


def context(engine, tokenizer, options=None, *, template=True, kwargs=None, new_tokens=512, **sections):
    data = {"apply_chat_template": template, "apply_chat_template_kwargs": kwargs or {}}
    return Context(
        config=Config(data=data, **sections),
        options=options or Options(),
        engine=engine,
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=new_tokens),
    )


def room(ctx, judge):
    return Room.of(ctx, judge, load_words(""), messages=False)


def pending(tokenizer, *, samples=1, template=True, kwargs=None, problem=PROBLEM):
    """A group as the core issues it; its prompt through the template."""
    text = said = load_words("").prompt(problem, chat=template)
    if template:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **(kwargs or {}))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    metadata = {"problem": {"id": problem.id, "name": problem.name, "source": problem.source, "level": 1, "where": ""}}
    prompt = Prompt(id="main/0", position=0, prompt=said, tokens=tokens, metadata=metadata)
    pending = [
        Sample(
            id=f"main/0-{j}", prompt=said, tokens=list(tokens), metadata=dict(metadata), rollout_id=j,
            session_id=f"main/0-{j}",
        )
        for j in range(samples)
    ]  # fmt: skip
    return Group(prompt=prompt, samples=pending, rollouts={j: [j] for j in range(samples)})
