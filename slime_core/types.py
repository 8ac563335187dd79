"""The types that travel between rooms. Standard library and numpy only; nothing here computes.

    PromptSource -> Prompt -> Group of Samples -> (Reward | Drop) -> Batch -> MicroBatch -> StepReport
                                   ^ GenerateRequest / Completion        WeightUpdate: trainer -> engine

Dimensions in names and shapes: S samples of a step, G groups, T tokens (prompt and response), R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slime_core.routed_experts import longer_rows

Message = dict[str, Any]
"""One chat message: ``role`` and ``content``, and any further fields that the chat template reads."""

Columns = dict[str, NDArray[Any]]
"""Name to a flat array over the R response tokens of a whole step, in batch order."""


class Status(StrEnum):
    """State of a sample. ``pending`` and ``aborted`` may be generated further; the others are final."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, frozen=True, kw_only=True)
class ArrayRef:
    """Large per-token data, kept in a segment file and never in a list.

    Example: ArrayRef(segment="000001.seg", offset=4096, dtype="int16", shape=(60, 4, 2), crc32=0x1B2C3D4E)
    """

    segment: str  # file name inside the run's segments/ folder
    offset: int  # bytes from the start of that file
    dtype: str  # numpy name, little endian
    shape: tuple[int, ...]
    crc32: int  # of the raw bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


MediaInputs = dict[str, list[Any]]
"""``images``, ``videos`` and ``audios``, in the order of their placeholders: each a path or a ``data:`` URI."""


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class Media:
    """Pictures, videos and sounds of a request, in the order of their placeholders in its tokens.

    Example: Media(images=(png,), arrays={"pixel_values": pixels, "image_grid_thw": np.array([[1, 4, 4]])})
    """

    images: tuple[bytes, ...] = ()  # encoded files: PNG, JPEG, ...
    videos: tuple[bytes, ...] = ()
    audios: tuple[bytes, ...] = ()
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # by argument of the model's forward

    def digest(self) -> str:
        """Equal for equal files in equal places; of the arrays where there are no files."""
        digest = blake2b(digest_size=16)
        files = [(kind, one) for kind in ("images", "videos", "audios") for one in getattr(self, kind)]
        for kind, one in files:
            digest.update(f"{kind} {len(one)} ".encode())
            digest.update(one)
        for name, array in sorted(self.arrays.items()) if not files else ():
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(slots=True, frozen=True, kw_only=True)
class Prompt:
    """One row of a task, numbered by its place in the run's order.

    Example:
        Prompt(id="grpo/17", task="arithmetic", position=17, prompt="12+30=", tokens=[3, 4, 12, 5, 2, 13], label="42")
    """

    id: str  # unique in the run: "STAGE/POSITION", or "eval/NAME/ROW"
    task: str = "default"
    position: int = 0  # place in the run's order, counted from 0
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)  # of the prompt as the model sees it, chat template applied
    multimodal_inputs: MediaInputs | None = None  # tokens have one placeholder for each feature of these
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # "file:line" or "dataset[row]", for messages


@dataclass(slots=True, kw_only=True)
class Sample:
    """One sequence to train on: THUDM/slime's field names, filled as it moves through the pipeline.

    ``tokens`` is prompt then response; ``loss_mask``, ``rollout_log_probs``, ``weight_versions``, ``advantages`` and
    ``returns`` have one entry a response token. A token that no model of ours sampled (a tool's answer) has mask 0.

    Example:
        s = Sample(id="grpo/17-0", prompt="12+30=", tokens=[3, 4, 12, 5, 2, 13])
        s.append_response([6, 4, 1], log_probs=[-0.1, -0.2, -0.01], version=3)
        assert s.response_length == 3 and s.loss_mask == [1, 1, 1]
    """

    id: str = ""  # unique in the run: "PROMPT_ID-ROLLOUT", fan-out siblings "PROMPT_ID-ROLLOUT.K"
    task: str = "default"
    role: str = "policy"  # which agent speaks; advantages compare samples of one role
    model: str = ""  # the adapter that makes it and learns from it, or a frozen model; empty for the one in training
    prompt: str | list[Message] = ""
    response: str = ""
    tokens: list[int] = field(default_factory=list)  # int32 range
    response_length: int = 0  # tokens
    loss_mask: list[int] | None = None  # 0 or 1 a response token; None counts as all 1
    reward: float | dict[str, Any] | None = None
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.PENDING
    rollout_log_probs: list[float] | None = None  # of each response token under the distribution it was drawn from
    weight_versions: list[int] = field(default_factory=list)  # a response token; -1 where no model made it
    group_index: int | None = None  # the prompt's position
    index: int | None = None  # of the sample in the run
    rollout_id: int | None = None  # fan-out siblings share it; None means its own
    attempt: int = 0  # 0 for the first try; part of the draw's key
    temperature: float = 1.0  # of its draws: the trainer divides logits by it
    session_id: str = ""
    remove_sample: bool = False  # trains with mask 0, still counts in its group
    multimodal_inputs: MediaInputs | None = None
    multimodal_train_inputs: dict[str, ArrayRef | NDArray[Any]] | None = None
    """The processor's arrays, by argument of the model's forward; in memory until the ledger has them."""
    rollout_routed_experts: ArrayRef | NDArray[Any] | None = None
    """[n, layers, k], the experts that the engine chose for its first n tokens; in memory until the ledger has it."""
    rollout_top_p_token_ids: ArrayRef | None = None
    teacher_log_probs: list[float] | None = None
    train_metadata: dict[str, Any] = field(default_factory=dict)
    advantages: list[float] | None = None
    returns: list[float] | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> list[int]:
        """The response's token ids."""
        return self.tokens[self.prompt_length :]

    def append_response(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        mask: int | Sequence[int] = 1,
        *,
        text: str = "",
        version: int | Sequence[int] = -1,
        routed_experts: NDArray[Any] | None = None,
    ) -> None:
        """Add one turn's tokens: a model's, with their log-probs, or an environment's, with ``mask=0``.

        ``routed_experts`` is a completion's, from the sample's first token on; rows that the sample has stay, and
        none is added where those of an earlier turn are missing.

        Raises:
            ValueError: trainable tokens without log-probs, or lists that differ in length.
        """
        count = len(tokens)
        masks, versions = ([one] * count if isinstance(one, int) else one for one in (mask, version))
        if log_probs is None and any(masks):
            raise ValueError(f"sample {self.id}: {count} trainable tokens came without log-probs; pass mask=0")
        log_probs = [0.0] * count if log_probs is None else log_probs
        lengths = {"tokens": count, "log_probs": len(log_probs), "mask": len(masks), "version": len(versions)}
        if set(lengths.values()) != {count}:
            raise ValueError(f"sample {self.id}: lengths differ in append_response: {lengths}")
        before, grown = self.response_length, []
        covered = routed_experts is not None and self._experts_covered()
        fills = {"tokens": 0, "loss_mask": 1, "weight_versions": -1, "rollout_log_probs": 0.0}
        for (name, fill), more in zip(fills.items(), (tokens, masks, versions, log_probs), strict=True):
            values = getattr(self, name)
            values = values if isinstance(values, list) else list(map(type(fill), () if values is None else values))
            grown.append((name, values, [fill] * (before - len(values)) + list(map(type(fill), more))))
        for name, values, new in grown:  # in place, as in slime: a function may hold one of these lists
            values += new
            setattr(self, name, values)
        self.response_length, self.response = before + count, self.response + text
        if covered:
            self.rollout_routed_experts = longer_rows(self.rollout_routed_experts, routed_experts)

    def _experts_covered(self) -> bool:
        """Whether the last token that a model made has the experts of those before it."""
        last = max((place for place, version in enumerate(self.weight_versions) if version >= 0), default=-1)
        rows = self.rollout_routed_experts
        return last < 0 or (rows is not None and rows.shape[0] >= self.prompt_length + last)

    def truncate_response(self, count: int, text: str) -> None:
        """Leave the first ``count`` tokens of the response, which are ``text``, such as those before unread words."""
        del self.tokens[self.prompt_length + count :]
        for values in (self.loss_mask, self.rollout_log_probs, self.weight_versions):
            if values is not None:
                del values[count:]
        if isinstance(self.rollout_routed_experts, np.ndarray):
            self.rollout_routed_experts = self.rollout_routed_experts[: len(self.tokens)]
        self.response_length, self.response = count, text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; an ArrayRef becomes a dict of its own fields."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(Sample)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The sample that :meth:`to_dict` wrote.

        Raises:
            TypeError: a key that is no field.
        """
        values = dict(data)
        values["status"] = Status(values.get("status", "pending"))
        for name in ("rollout_routed_experts", "rollout_top_p_token_ids"):
            values[name] = _array_ref(values.get(name))
        if inputs := values.get("multimodal_train_inputs"):
            values["multimodal_train_inputs"] = {key: _array_ref(ref) for key, ref in inputs.items()}
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, ArrayRef):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _array_ref(data: Any) -> Any:
    """The reference that a mapping was; anything else as it is."""
    return ArrayRef(**{**data, "shape": tuple(data["shape"])}) if isinstance(data, Mapping) else data


@dataclass(slots=True, kw_only=True)
class Group:
    """All samples of one prompt. Members are found by ``rollouts``, never by position.

    Example: Group(prompt=p, samples=[a, b1, b2], rollouts={34: [0], 35: [1, 2]})   # rollout 35 fanned out into two
    """

    prompt: Prompt
    samples: list[Sample]
    rollouts: dict[int, list[int]]  # rollout id -> indices into samples

    @property
    def id(self) -> str:
        """The prompt's id."""
        return self.prompt.id

    def part(self, members: Sequence[int]) -> Group:
        """The group of some of its samples; rollouts that lose all of theirs are left out."""
        if len(members) == len(self.samples):
            return self
        places = {old: new for new, old in enumerate(members)}
        places_of = {
            rollout: [places[i] for i in indices if i in places] for rollout, indices in self.rollouts.items()
        }
        rollouts = {rollout: indices for rollout, indices in places_of.items() if indices}
        return Group(prompt=self.prompt, samples=[self.samples[i] for i in members], rollouts=rollouts)

    def lowest_version(self, default: int) -> int:
        """The oldest weights that made a token here, or ``default`` where no model did."""
        versions = {v for sample in self.samples for v in set(sample.weight_versions) if v >= 0}
        return min(versions, default=default)


@dataclass(slots=True, frozen=True, kw_only=True)
class Reward:
    """A reward function's result for one sample.

    ``score`` is a judgement; ``failed`` is a judgement too (the candidate broke, its ``value`` is its score);
    ``infra_error`` says that nothing could be judged: such a sample is dropped and never trained on.

    Example:
        Reward(value=1.0, terms={"correct": 1.0, "format": 0.0})
        Reward(value=0.0, kind="infra_error", reason="the judge did not answer in 30 s")
    """

    value: float
    kind: Literal["score", "failed", "infra_error"] = "score"
    terms: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Drop:
    """Why a group does not train. The reason is counted in metrics and written to the ledger.

    Example: Drop(reason="zero_std")
    """

    reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off.

    Example: SamplingParams(max_new_tokens=64, temperature=1.0, stop=("\\n",))
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerateRequest:
    """A request to an engine: the tokens to continue.

    The draw at absolute position t is a function of ``(seed, t)`` alone: continuing a request repeats nothing.

    Example: GenerateRequest(id="grpo/17-0", tokens=[3, 4, 12], params=SamplingParams(max_new_tokens=8), seed=81)
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    seed: int  # 64 bits, from (run seed, sample id, attempt): slime_core.seeds
    session_id: str = ""
    kept: int = 0  # of tokens, at their end: this response's from an aborted try; stop strings look back over them
    media: Media | None = field(default=None, compare=False)
    adapter: str = ""  # one of the run's, or "base"; "": the first of them, and the base where there is none

    def text(self, tokenizer: Any, tokens: Sequence[int], finish: str) -> str:
        """``tokens`` decoded, cut before the first stop string where one ended the response; "" with no tokenizer."""
        if not tokens or tokenizer is None:
            return ""
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        ends = [text.find(stop) for stop in self.params.stop if stop in text]
        return text[: min(ends)] if ends and finish == "stop" else text


@dataclass(slots=True, kw_only=True)
class Completion:
    """Tokens out: what an engine made of a request. All lists have one entry a new token.

    Example:
        Completion(id="a-0", tokens=[1], log_probs=[-0.1], plain_log_probs=[-0.1], finish="stop", versions=[3])
    """

    id: str
    tokens: list[int]
    log_probs: list[float]  # under the distribution drawn from: temperature, top-p and top-k applied
    plain_log_probs: list[float]  # under the plain softmax, temperature 1; empty if the engine has none
    finish: Literal["stop", "length", "abort"]
    versions: list[int]  # weights that made each token
    epoch: int = 0  # process start of the engine
    text: str = ""  # decoded, stop string cut off; never re-tokenised
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Wall time in ``queue`` and then in ``prefill``, where the engine says it; the rest of a request is decoding."""
    routed_experts: NDArray[Any] | None = field(default=None, compare=False)
    """[n, layers, k], the experts chosen for the first n tokens of prompt and response, all but the last; or None."""


def joined_experts(pieces: Iterable[Completion]) -> NDArray[Any] | None:
    """Routed experts of a sequence that was made in pieces, each by the weights that first computed its token.

    Where a piece with tokens lacks them, those before it: what a later piece has of its tokens may be later weights'.
    """
    rows = None
    for piece in pieces:
        if piece.routed_experts is None and piece.tokens:
            break
        rows = longer_rows(rows, piece.routed_experts)
    return rows


@dataclass(slots=True, kw_only=True)
class Batch:
    """A whole step as columns: ragged arrays stored flat, with offsets.

    ``tokens[offsets[i]:offsets[i + 1]]`` is sample i, prompt then response;
    ``x[response_offsets[i]:response_offsets[i + 1]]`` is its part of ``loss_mask`` and of every column.

    Example: two samples with 2 + 3 and 1 + 1 tokens
        offsets [0, 5, 7], response_offsets [0, 3, 4], loss_mask [1, 1, 1, 1], reward [1.0, 0.0]
    """

    version: int  # of the weights in training
    stage: str = "main"
    sample_ids: list[str]  # S
    tasks: list[str]  # S
    roles: list[str] = field(default_factory=list)  # S, who spoke; empty where all are one
    models: list[str] = field(default_factory=list)  # S, the adapter that learns from each; empty where all are one
    group: NDArray[np.int64]  # S, an id a group (the prompt's position)
    rollout: NDArray[np.int64]  # S, fan-out siblings share it
    reward: NDArray[np.float64]  # S
    tokens: NDArray[np.int32]  # T
    offsets: NDArray[np.int64]  # S + 1
    loss_mask: NDArray[np.float32]  # R, 0 or 1
    response_offsets: NDArray[np.int64]  # S + 1
    columns: Columns = field(default_factory=dict)  # R each: rollout_log_probs, policy, reference, advantages, ...
    temperature: NDArray[np.float32] | None = None  # S, of the draws; None counts as 1
    multimodal: list[dict[str, ArrayRef | NDArray[Any]] | None] | None = None  # S
    routed_experts: list[ArrayRef | NDArray[Any] | None] | None = None  # S
    train_metadata: list[dict[str, Any]] = field(default_factory=list)  # S

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """S, tokens of each response."""
        return np.diff(self.response_offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """S, tokens of each prompt and response."""
        return np.diff(self.offsets)

    def sample_of_token(self) -> NDArray[np.int64]:
        """R, the sample index of each response token."""
        return np.repeat(np.arange(len(self)), self.response_lengths)


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Segments end to end in one row; one with a ``prefix`` continues that segment, which several may share.

    Row ``predict[j]`` of the output predicts response token j of this pack, whose id is ``target[j]``.

    Example: one sample with 2 prompt and 3 response tokens
        tokens [5 ids], cu_seqlens [0, 5], prefix [-1], predict [1, 2, 3], target [tokens[2], tokens[3], tokens[4]]
    """

    samples: NDArray[np.int64]  # n, indices into the Batch; of a shared prompt the first that has it
    tokens: NDArray[np.int64]  # T
    position_ids: NDArray[np.int64]  # T, or 3 x T of three axes; from 0 in every sequence, going on after a prefix
    cu_seqlens: NDArray[np.int32]  # n + 1
    prefix: NDArray[np.int32]  # n, the segment that comes before, -1 for none
    predict: NDArray[np.int64]  # R
    target: NDArray[np.int64]  # R
    response: NDArray[np.int64]  # R, where in the Batch's flat columns each response token lies
    weight: NDArray[np.float32]  # R, the token's weight in the loss of the whole optimizer step; 0 where masked
    columns: Columns = field(default_factory=dict)  # R each
    temperature: NDArray[np.float32] | None = None  # R
    media: Any = None  # `trainers.media.PackMedia` of its segments, or None where they have no pictures
    filler: bool = False  # passed only because other ranks have a micro-batch more


@dataclass(slots=True, frozen=True, kw_only=True)
class AdapterUpdate:
    """One adapter's weights in peft's form, for an engine that computes with them beside the base.

    Example: AdapterUpdate(config={"r": 8}, tensors={"model.layers.0.self_attn.q_proj.lora_A.weight": a, ...})
    """

    config: Mapping[str, Any]  # of adapter_config.json
    tensors: Mapping[str, Any]  # names as in adapter_model.safetensors without ``base_model.model.``; float32


@dataclass(slots=True, kw_only=True)
class WeightUpdate:
    """Weights on their way from a trainer to engines, in Hugging Face names.

    ``publish`` starts a transfer and returns at once; the engine's ``load`` completes it. The base of ``adapters``
    crosses once: not to an engine that has it (`WeightRoute.base`). Their checksums go under ``ADAPTER/NAME``.

    Example: WeightUpdate(version=4, epoch=1, transport="shared", fingerprints={"lm_head.weight": "9f3c..."})
    """

    version: int
    epoch: int
    transport: str  # "shared": the engine reads the trainer's storage; "tensors": `tensors` holds them; more by issue
    tensors: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)  # name -> checksum of the trainer's bytes
    handle: Any = None  # further data of the transport
    adapters: Mapping[str, AdapterUpdate] = field(default_factory=dict)  # by name, the one in training first


Transport = Literal["disk", "tensor", "nccl", "tensors"]
"""disk: a safetensors folder. tensor: CUDA IPC handles, on one machine. nccl: a broadcast into the servers' ranks.
tensors: the update itself."""

WeightCheck = Literal["all", "rolling", "none"]
"""Which tensors are compared after an update: every one, the next few in turn, none."""

Checksum = Literal["sha256", "murmur"]
"""sha256: the first 8 bytes, big endian (SGLang on a CPU). murmur: SGLang's 64-bit hash on a GPU."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Piece:
    """Rows (or columns) ``start`` to ``stop`` along ``dim`` of a Hugging Face tensor; ``stop`` -1 is its end.

    With an empty ``name``, ``stop`` rows (or columns) of zeros, otherwise as large as the piece before.

    Example: Piece(name="model.layers.0.self_attn.q_proj.weight", dim=0, start=0, stop=-1)
    """

    name: str
    dim: int = 0
    start: int = 0
    stop: int = -1


@dataclass(slots=True, frozen=True, kw_only=True)
class RankTensor:
    """One tensor as a rank of an engine holds it: pieces of Hugging Face tensors end to end along ``dim``.

    Example:
        Held(name="model.layers.0.self_attn.qkv_proj.weight", rank=0, pieces=(q, k, v))
    """

    name: str  # the engine's own
    rank: int = 0  # of the engine's tensor-parallel ranks
    pieces: tuple[Piece, ...]
    dim: int = 0
    wide: bool = False  # the engine may keep it in float32: then the same values have other bytes

    @property
    def key(self) -> str:
        """Under which its checksum goes: ``NAME``, and ``NAME@RANK`` for ranks after the first."""
        return f"{self.name}@{self.rank}" if self.rank else self.name


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightRoute:
    """Route of one weight update: requested by an engine, started by the trainer in its ranks.

        Engine.route(check) -> WeightRoute -> Trainer.publish(version, route) -> WeightUpdate -> Engine.load

    An engine in the trainer's process, or one that reads its memory, has no route: it takes ``WeightUpdate.tensors``
    (with adapters it has one once it holds their base).
    For any other the trainer puts the checksums of ``checks`` into ``WeightUpdate.fingerprints``: of the bytes that
    the engine must then hold, in its names.

    Example:
        WeightRoute(transport="disk", dtype="bfloat16", folder="runs/demo-1/weights", checksum="sha256", checks=())
    """

    transport: Transport
    dtype: str  # of the engine's tensors: "float32" or "bfloat16"
    folder: str = ""  # disk: where folders v-VERSION are put
    buffer_bytes: int = 512 << 20  # tensor, nccl: of one bucket
    copies: tuple[int, ...] = ()  # tensor: trainer ranks other than 0 that share a GPU with servers: each holds a copy
    address: str = ""  # nccl: HOST:PORT of the rendezvous
    world: int = 0  # nccl: ranks of all servers, and one of the trainer, which is rank 0
    group: str = ""  # nccl: name of the process group
    timeout: float = 600.0  # nccl: seconds until the trainer gives up on servers that do not take the weights
    checksum: Checksum = "sha256"
    checks: tuple[RankTensor, ...] = ()  # tensors whose checksums the update carries
    base: bool = True  # False: the engine has the frozen base of the adapters, and the update holds these alone


@dataclass(slots=True, frozen=True, kw_only=True)
class StepReport:
    """One finished step, as sinks and `slime_step_done` see it.

    Example: StepReport(version=4, stage="main", step=3, of=40, metrics={"reward/mean": 0.5}, seconds={"train": 1.2})
    """

    version: int  # steps completed in the run
    stage: str
    step: int  # in the stage, from 0
    of: int  # steps of the stage
    metrics: dict[str, float]
    seconds: dict[str, float]  # wall time by part

    def items(self) -> Iterator[tuple[str, float]]:
        """Metric names and values, times included as ``time/NAME``."""
        yield from {**self.metrics, **{f"time/{name}": value for name, value in self.seconds.items()}}.items()
