"""Bodies of the buffer's HTTP requests and responses. Strict: an unknown key is an error.

Ask -> Asked          ClaimWork -> Works         Write -> Written       Push -> Asked
Lease -> Held         ClaimBatch -> Claimed      Settle -> Settled      DropGroups -> Asked
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from slime_buffer.service.values import (
    LONGEST,
    SLACK,
    Attempt,
    Json,
    Name,
    Number,
    Reason,
    RunName,
    Seconds,
    State,
    Table,
    Text,
    Token,
    Tokens,
    Verdict,
    Wait,
    Wire,
    plain,
)


class Sampling(Wire):
    """How tokens are drawn; ``temperature`` 0 is greedy, ``top_k`` 0 and ``top_p`` 1 are off."""

    max_new_tokens: int = Field(ge=1, le=LONGEST)
    temperature: float = Field(1.0, ge=0, le=1000)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    stop: list[Text] = Field(default=[], max_length=64)
    stop_token_ids: list[Token] = Field(default=[], max_length=1024)
    ignore_eos: bool = False


class EngineEndpoint(Wire):
    """Where tokens can be had: a `/generate` of SGLang's shape."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[!-~]{1,300}$")]
    token: Annotated[str, StringConstraints(max_length=200, pattern=r"^[!-~]*$")] = ""


class Wanted(Wire):
    """A requested rollout: the sample's id, and the key of its draws."""

    id: Name
    seed: int = Field(0, ge=0, lt=2**64)


class GroupDescription(Wire):
    """What a group is of."""

    id: Name = Field(examples=["grpo/17"])
    attempt: Attempt = 0
    task: Name = "default"
    prompt: Annotated[str | list[dict[str, Any]], AfterValidator(plain)] = ""
    tokens: Tokens = Field(default=[], examples=[[3, 4, 12, 5, 2, 13]])
    label: Json = None
    metadata: Table = Field(default={})


class AskedGroup(GroupDescription):
    """A group that the trainer wants."""

    samples: list[Wanted] = Field(min_length=1, max_length=1024)
    sampling: Sampling
    version: int = Field(-1, ge=-1, lt=2**53, description="Version of the weights when it was requested.")

    @model_validator(mode="after")
    def _distinct(self) -> AskedGroup:
        if len({sample.id for sample in self.samples}) != len(self.samples):
            raise ValueError("two samples have one id")
        return self


class Ask(Wire):
    """Start a rollout. Repeating it changes nothing; a group that was read or dropped is handed out again."""

    run: RunName = Field(examples=["demo-0"])
    engine: EngineEndpoint | None = None
    groups: list[AskedGroup] = Field(max_length=1024)


class Standing(Wire):
    """State of a group."""

    group: Name
    attempt: Attempt
    state: State
    reason: str = ""


class Asked(Wire):
    """Where the named groups stand now."""

    groups: list[Standing]


class ClaimWork(Wire):
    """Take open groups for a while. The same ``worker`` and ``request`` get the same groups again."""

    worker: Name
    request: Name = Field(description="A new one a claim; a repeated one repeats its answer.")
    run: RunName | None = None
    task: Name | None = None
    count: int = Field(1, ge=1, le=256)
    lease_seconds: Seconds = 60.0
    wait_seconds: Wait = 0.0


class Work(GroupDescription):
    """An open group, leased. ``samples`` are those not written yet."""

    lease: Name
    run: RunName
    samples: list[Wanted]
    sampling: Sampling
    version: int
    engine: EngineEndpoint | None = None


class Works(Wire):
    """What was claimed; empty where nothing was open."""

    items: list[Work]


class Lease(Wire):
    """Leases to extend or give back."""

    leases: list[Name] = Field(min_length=1, max_length=1024)
    lease_seconds: Seconds = 60.0


class Held(Wire):
    """Which of them were still held."""

    held: list[str]
    lost: list[str]


class Sequence(Wire):
    """One sequence to train on. Lists have an entry a response token; ``tokens`` is prompt, then response."""

    tokens: Annotated[list[Token], Field(min_length=1, max_length=LONGEST, examples=[[3, 4, 12, 6, 1]])]
    response_length: int = Field(ge=1, le=LONGEST, examples=[2])
    log_probs: list[Number] = Field(
        max_length=LONGEST, description="Under the distribution drawn from; 0 where masked."
    )
    weight_versions: list[Annotated[int, Field(ge=-1, lt=2**53)]] = Field(
        max_length=LONGEST, description="Weights that made each token; -1 where no model did."
    )
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]] | None = Field(None, max_length=LONGEST)
    response: Text = ""
    status: Literal["completed", "truncated"] = "completed"
    reward: Number | dict[Name, Number] | None = Field(None, description="None: the reader judges.")
    temperature: float = Field(1.0, gt=0, le=1000, description="Of the draws.")
    metadata: Table = Field(default={})
    train_metadata: Table = Field(default={})

    @model_validator(mode="after")
    def _fits(self) -> Sequence:
        count = self.response_length
        lengths = {"log_probs": len(self.log_probs), "weight_versions": len(self.weight_versions)}
        if self.loss_mask is not None:
            lengths["loss_mask"] = len(self.loss_mask)
        wrong = {name: length for name, length in lengths.items() if length != count}
        if wrong or count > len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, response_length {count}, and {wrong}")
        if max(self.log_probs) > SLACK:
            raise ValueError("a log-prob is above 0")
        mask = self.loss_mask or [1] * count
        if any(on and version < 0 for on, version in zip(mask, self.weight_versions, strict=True)):
            raise ValueError("a token that trains has weight version -1")
        return self


class Rollout(Wire):
    """What became of one rollout: its sequences, in order, or why it failed. The first that is written stays."""

    sample: Name
    sequences: list[Sequence] = Field(default=[], max_length=64)
    failed: Annotated[str, StringConstraints(max_length=200), AfterValidator(plain)] = ""

    @model_validator(mode="after")
    def _either(self) -> Rollout:
        if bool(self.sequences) == bool(self.failed):
            raise ValueError("give sequences, or say in failed why there are none")
        return self


class Trajectory(Rollout):
    """One rollout of an open group."""

    group: Name
    attempt: Attempt = 0


class Write(Wire):
    """Rollouts of a run's open groups."""

    run: RunName
    trajectories: list[Trajectory] = Field(min_length=1, max_length=1024)


class Judged(Wire):
    """What became of one written rollout."""

    group: Name
    attempt: Attempt
    sample: Name
    state: Verdict
    why: str = ""


class Written(Wire):
    """Each sample's outcome (stored, known before, or refused), and the groups that are complete now."""

    trajectories: list[Judged]
    finished: list[Name]


class PushedGroup(GroupDescription):
    """A whole group that no run requested."""

    rollouts: list[Rollout] = Field(min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _distinct(self) -> PushedGroup:
        if len({rollout.sample for rollout in self.rollouts}) != len(self.rollouts):
            raise ValueError("two rollouts have one id")
        return self


class Push(Wire):
    """Groups that a generator pushes, for the readers of ``run``."""

    run: RunName
    groups: list[PushedGroup] = Field(min_length=1, max_length=256)


class ClaimBatch(Wire):
    """Take groups that have ended. The same ``reader`` and ``request`` get the same groups again."""

    reader: Name
    request: Name
    run: RunName
    count: int = Field(1, ge=1, le=256)
    lease_seconds: Seconds = 60.0
    wait_seconds: Wait = 0.0
    restart: bool = Field(False, description="Give back what this reader still holds, first.")


class Ended(GroupDescription):
    """A group that has ended: finished, with what became of each rollout, or dropped."""

    state: Literal["finished", "dropped"]
    reason: str = ""
    rollouts: list[Rollout]


class Claimed(Wire):
    """A claim and its groups; without a claim there was nothing."""

    claim: Name | None
    groups: list[Ended]


class Key(Wire):
    """Names a group of a run."""

    group: Name
    attempt: Attempt = 0


class Settle(Wire):
    """Which groups of a claim; all of them where ``groups`` is left out."""

    groups: list[Key] | None = Field(None, max_length=1024)


class Settled(Wire):
    """How many groups were acknowledged or given back; those that the claim no longer held are not counted."""

    groups: int


class DropGroups(Wire):
    """Give up groups that are open or unread; their samples end as dropped(reason)."""

    run: RunName
    groups: list[Key] = Field(min_length=1, max_length=1024)
    reason: Reason
    tell: bool = Field(True, description="Hand them to the reader, so that it stops waiting.")


class PeekQuery(BaseModel):
    """Which groups to list; ``after`` is the last serial of the page before."""

    model_config = ConfigDict(extra="forbid")

    state: State | None = None
    run: RunName | None = None
    after: int = Field(0, ge=0, lt=2**63)
    limit: int = Field(100, ge=1, le=500)


class Row(Wire):
    """A group, from outside."""

    serial: int
    run: str
    group: str
    attempt: int
    task: str
    state: State
    reason: str
    samples: int
    written: int
    unread: bool
    leased: bool
    claimed: bool


class Rows(Wire):
    """One page of groups, oldest first."""

    groups: list[Row]


class Stats(Wire):
    """Counts of samples (the conservation law) and of groups, queues, and what happened since the start."""

    samples: dict[str, int]
    conserved: bool
    groups: dict[str, int]
    queues: dict[str, int]
    since_start: dict[str, int]
    per_minute: dict[str, int]
    seconds: float


class Health(Wire):
    """The service is up."""

    status: Literal["ok"] = "ok"


class Problem(Wire):
    """What is wrong with a request, and what to do."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    fix: str = ""


class Refusal(Wire):
    """The body of every answer that is no success."""

    error: Problem
