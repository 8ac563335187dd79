"""A prompt from a row: keys, types, the chat template and the count of tokens.

A row's identity is its own id (`data.id_key`) or its place, ``FILE:LINE``; it is kept in ``metadata["row_id"]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.sections.evaluation import EvalTask
from slime_core.data.chat import check_prompt, check_text, decode, encode, render, require_template
from slime_core.data.conversations import EncodedReply, ReplyEncoder
from slime_core.data.rows import DataRows
from slime_core.data.strict import check_value
from slime_core.data.template_trial import try_template
from slime_core.errors import DataError, nearest
from slime_core.media.placing import MARK, bare, placed, plainly, references_of
from slime_core.media.processor import refuse_unseen
from slime_core.media.references import TRUSTED, Access, MediaLimits, checked, kind_of, parts_of, plain_inputs
from slime_core.types import MediaInputs, Message, Prompt

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.data import DataSection, DataTask
    from slime_core.media.processor import MediaProcessor

Rewrite = Callable[[list[Message], list[Any] | None, Prompt], tuple[list[Message], list[Any] | None]]
"""A row's messages, tools and prompt without tokens, to the messages and tools that the chat template renders."""

MAX_ID = 512
PAIRS = "dpo_loss"
CATEGORY = "category"  # in the metadata of an evaluation set's prompts
REPLIES = "replies"  # in the metadata of a prompt: the data's replies, tokens and loss_mask each


@dataclass(slots=True, kw_only=True)
class Parsed:
    """What a row says, checked, with nothing encoded yet."""

    prompt: str | list[Message]
    label: Any
    metadata: dict[str, Any]
    tools: list[Any] | None
    row_id: str
    where: str
    replies: tuple[str | list[Message], ...] = ()  # the chosen and the rejected one
    media: MediaInputs = field(default_factory=dict)  # of the row's own columns


@dataclass(slots=True, frozen=True, kw_only=True)
class Keys:
    """Which columns of a task's rows are read."""

    input: str
    label: str
    metadata: str
    tools: str
    id: str
    category: str = ""  # of evaluation sets
    replies: tuple[str, ...] = ()  # columns of the chosen and of the rejected reply
    media: Mapping[str, str] = field(default_factory=dict)  # kind -> column
    access: Access = field(default_factory=Access)  # what rows may name; a folder in place of the data's own
    columns: frozenset[str] = field(init=False, compare=False)  # all of them, for readers that decode by column
    required: tuple[tuple[str, str], ...] = field(init=False, compare=False)  # key of every row, and its setting

    @classmethod
    def of(cls, config: Config, task: DataTask) -> Keys:
        """The section's keys, the task's own where it has some."""
        data = config.data
        evaluation = isinstance(task, EvalTask)
        category = task.category_key or config.eval.eval_category_key if isinstance(task, EvalTask) else ""
        pairs = config.train.loss_type == PAIRS and not evaluation
        return cls(
            input=task.input_key or data.input_key,
            label=task.label_key or data.label_key,
            metadata=data.metadata_key,
            tools=data.tool_key,
            id=data.id_key,
            category=category,
            media={kind_of(kind): column for kind, column in data.multimodal_keys.items()},
            access=access_of(data),
            replies=(data.chosen_key, data.rejected_key) if pairs else (),
        )

    def __post_init__(self) -> None:
        media = self.media.values()
        plain = (self.input, self.label, self.metadata, self.tools, self.id, self.category, *media, *self.replies)
        named = (self.label, "label_key"), (self.id, "id_key")
        prompts = [(self.input, "data.input_key")] if not self.replies else []  # pairs may begin with their prompt
        prompts += zip(self.replies, ("data.chosen_key", "data.rejected_key"))
        needed = [*prompts, *((name, f"data.{key}") for name, key in named if name)]
        if self.category:
            needed.append((self.category, "eval.eval_category_key"))
        object.__setattr__(self, "columns", frozenset(filter(None, plain)))
        object.__setattr__(self, "required", tuple(needed))


def parse_row(row: dict[str, Any], keys: Keys, where: str, root: Path | None) -> Parsed:
    """Read the configured keys from a row.

    Raises:
        DataError: DAT18 a key that the row lacks, DAT24 a wrong type, DAT25 a broken message, DAT31 a number that is
            not finite, DAT32 nesting, DAT33 media elsewhere, DAT34 an id that is a path.
    """
    for name, setting in keys.required:
        if name not in row:
            listing = ", ".join(map(repr, list(row)[:20])) or "no keys"
            raise DataError(
                f"the row has no {name!r}",
                code="DAT18",
                where=where,
                why=f"it has {listing}",
                fix=f"set {setting} to one of them{_maybe(nearest(name, list(row)))}",
            )
    access = keys.access if keys.access.folder else replace(keys.access, folder=root)
    values = {name: row[name] for name in keys.columns if name in row and name not in keys.media.values()}
    check_value(values, where)
    replies = tuple(check_prompt(row[name], where, name, access) for name in keys.replies)
    for name, reply in zip(keys.replies, replies, strict=True):
        if isinstance(reply, str) and not reply.strip():
            fix = "fix the row, or skip such rows with data.max_bad_rows"
            raise DataError("the reply is empty", code="DAT24", where=f"{where}: {name}", fix=fix)
    return Parsed(
        replies=replies,
        prompt=check_prompt(row[keys.input], where, keys.input, access)
        if keys.input in row or not replies
        else _shared(replies, where),
        label=row[keys.label] if keys.label else None,
        media=_media(row, keys, where, access),
        metadata=_metadata(row.get(keys.metadata), keys.metadata, where)
        | ({CATEGORY: row[keys.category]} if keys.category else {}),
        tools=_tools(row.get(keys.tools) if keys.tools else None, keys.tools, where),
        row_id=check_id(row[keys.id], where) if keys.id else where.rsplit("/", 1)[-1],
        where=where,
    )


def check_columns(rows: DataRows, keys: Keys) -> None:
    """Of rows that have columns, refuse ones that lack a wanted column.

    Raises:
        DataError: DAT18.
    """
    names = rows.keys
    media = ((name, "data.multimodal_keys") for name in keys.media.values())
    for name, setting in (*keys.required, *media):
        if names is not None and name not in names:
            raise DataError(
                f"there is no column {name!r}",
                code="DAT18",
                where=rows.where(0),
                why=f"the columns are {', '.join(map(repr, names[:20]))}",
                fix=f"set {setting} to one of them{_maybe(nearest(name, names))}",
            )


def parse_of(rows: DataRows, index: int, keys: Keys, row: dict[str, Any] | None = None) -> Parsed:
    """`parse_row` of row ``index``, which ``row`` is where it was read before.

    Raises:
        DataError: as `parse_row`; DAT18 blames the row where a neighbour has the key that it lacks.
    """
    row = rows[index] if row is None else row
    try:
        return parse_row(row, keys, rows.where(index), rows.root)
    except DataError as error:
        lacking = [name for name, _ in keys.required if name not in row]
        if error.code == "DAT18" and lacking and len(rows) > 1:
            with suppress(DataError):  # the neighbour is invalid too and reports that itself
                if lacking[0] in rows[index - 1 if index else 1]:
                    error.why += f"; other rows have {lacking[0]!r}"
                    error.fix = "complete the row, or leave such rows out: data.max_bad_rows=1"
        raise


@dataclass(slots=True)
class Encoder:
    """Parsed rows and plugins' prompts to Prompts with tokens; ``limit`` is the longest prompt, 0 for none.

    ``wider`` is what to change for longer ones.
    """

    tokenizer: Any
    template: bool
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    limit: int = 0
    overlong: str = "drop"  # or truncate, error
    replies: ReplyEncoder | None = None  # of rows that bring replies, whose tokens count too
    wider: str = "raise data.rollout_max_prompt_len"
    rewrite: Rewrite | None = None  # `slime_messages`
    keeps_messages: bool = False  # without a template a function gets them; they are rendered for their length alone
    media: MediaProcessor | None = None  # of a model that takes pictures
    blindness: str = ""  # why pictures are refused; without it and ``media`` a function gets their references
    dropped: tuple[int, int] = (0, 0)  # tokens of the shortest and the longest prompt that were dropped

    def __post_init__(self) -> None:
        if self.template:
            require_template(self.tokenizer)
            try_template(self.tokenizer, self.template_kwargs)

    def prompt(self, parsed: Parsed, *, id: str, task: str, position: int) -> Prompt | None:
        """The prompt, or None where it is too long and such prompts are dropped.

        Raises:
            DataError: DAT24 an empty prompt, DAT25 messages the template refuses, DAT26 too long.
        """
        metadata = {"row_id": parsed.row_id, **parsed.metadata}
        if parsed.tools is not None:
            metadata["tools"] = parsed.tools
        prompt = Prompt(id=id, task=task, position=position, label=parsed.label, metadata=metadata, where=parsed.where)
        if self.replies is not None:
            return self._with_replies(prompt, parsed, self.replies)
        messages = self.keeps_messages and not self.template and not isinstance(parsed.prompt, str)
        text, inputs = self._text(
            parsed.prompt, parsed.media, parsed.tools, prompt, template=self.template or messages
        )
        tokens = self._tokens(text, inputs, parsed.where)
        prompt = replace(prompt, multimodal_inputs=self._references(inputs, parsed.where))
        return self._filled(prompt, parsed.prompt if messages else text, tokens, parsed.where)

    def _with_replies(self, prompt: Prompt, parsed: Parsed, encoder: ReplyEncoder) -> Prompt | None:
        where, inputs = parsed.where, parsed.media
        for content in (parsed.prompt, *parsed.replies):
            refuse_unseen([kind for kind, _ in parts_of(content)], where, self.blindness)
        if self.media is not None:
            messages = placed(parsed.prompt, parsed.media, where)
            inputs, plain = references_of(messages), isinstance(parsed.prompt, str) and not self.template
            parsed = replace(parsed, prompt=plainly(messages, self.media.marks) if plain else bare(messages))
        replies = self._encoded(parsed, encoder)
        if self.media is not None:
            replies = [expanded_reply(reply, self.media, inputs, where) for reply in replies]
        first = replies[0].prompt
        if not first:
            raise empty(where)
        if any(reply.prompt != first for reply in replies):
            raise DataError(
                "the two replies do not follow the same prompt",
                code="DAT25",
                where=where,
                why="the chat template writes the prompt in another way before each",
                fix="give both replies the same roles, or leave such rows out with data.max_bad_rows",
            )
        longest = max(len(first) + len(reply.tokens) for reply in replies)
        if self.overlong == "truncate" and self.limit and longest > self.limit and not inputs:
            replies = [reply.cut(self.limit) for reply in replies]
            longest = self.limit if all(any(reply.loss_mask) for reply in replies) else longest
        if self.limit and longest > self.limit:
            if self.overlong == "error":
                raise self._too_long("the conversation", longest, where)
            self._count_dropped(longest)
            return None
        encoded = [{"tokens": reply.tokens, "loss_mask": reply.loss_mask} for reply in replies]
        metadata = {**prompt.metadata, REPLIES: encoded}
        text = decode(self.tokenizer, first)
        return replace(
            prompt, prompt=text, tokens=first, metadata=metadata, multimodal_inputs=self._references(inputs, where)
        )

    def _encoded(self, parsed: Parsed, encoder: ReplyEncoder) -> list[EncodedReply]:
        prompt, where = parsed.prompt, parsed.where
        if not parsed.replies:
            if isinstance(prompt, str):
                raise no_reply(where)
            return [encoder.conversation(self._messages(prompt, where), parsed.tools, where)]
        if not self.template and isinstance(prompt, str):
            texts = [reply for reply in parsed.replies if isinstance(reply, str)]
            if len(texts) == len(parsed.replies):
                return [encoder.text(prompt, reply) for reply in texts]
        messages = self._messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, where)
        turns = [[{"role": "assistant", "content": r}] if isinstance(r, str) else r for r in parsed.replies]
        turns = [turn[len(messages) :] if turn[: len(messages)] == messages else turn for turn in turns]
        return [encoder.reply([*messages, *turn], len(messages), parsed.tools, where) for turn in turns]

    def _messages(self, messages: list[Message], where: str) -> list[Message]:
        if not self.template:
            render(messages, self.tokenizer, template=False, where=where)  # which says how to apply one
        return messages

    def tokens(self, parsed: Parsed) -> list[int]:
        """All tokens of a prompt, whatever the longest may have.

        Raises:
            DataError: as :meth:`prompt`, but DAT26.
        """
        prompt = Prompt(id="", metadata=parsed.metadata, where=parsed.where)
        text, inputs = self._text(parsed.prompt, parsed.media, parsed.tools, prompt, template=self.template)
        return self._tokens(text, inputs, parsed.where)

    def open(self, parsed: Parsed) -> None:
        """Decode the pictures of a row.

        Raises:
            DataError: DAT39, DAT40, DAT41.
        """
        if self.media is not None:
            self.media.open(parsed.media, parsed.where)
            self.media.open(references_of(parsed.prompt) if isinstance(parsed.prompt, list) else {}, parsed.where)

    def _references(self, inputs: MediaInputs, where: str) -> MediaInputs | None:
        """References that can be read again later."""
        references = {kind: values for kind, values in inputs.items() if values}
        refuse_unseen(references, where, self.blindness)
        return (references if self.media is None else self.media.fetch(references)) or None

    def _tokens(self, text: str, inputs: MediaInputs, where: str) -> list[int]:
        tokens = encode(self.tokenizer, text)
        return tokens if self.media is None else self.media.expand(tokens, inputs, where)

    def _text(
        self,
        content: str | list[Message],
        media: MediaInputs,
        tools: list[Any] | None,
        prompt: Prompt,
        *,
        template: bool,
    ) -> tuple[str, MediaInputs]:
        """The text with one placeholder for each picture, and the references in their order."""
        if template and self.rewrite is not None:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            content, tools = self.rewrite(messages, tools, prompt)
        where, inputs = prompt.where, media
        refuse_unseen([kind for kind, _ in parts_of(content)], where, self.blindness)
        if self.media is not None and (not isinstance(content, str) or MARK.search(content)):
            messages = placed(content, media, where)
            inputs = references_of(messages)
            plain = isinstance(content, str) and not template
            content = plainly(messages, self.media.marks) if plain else bare(messages)
        kwargs = self.template_kwargs
        return render(content, self.tokenizer, template=template, where=where, kwargs=kwargs, tools=tools), inputs

    def of_plugin(self, item: Prompt, *, id: str, task: str, position: int, where: str) -> Prompt | None:
        """A prompt from `slime_prompts`, numbered, and encoded unless the plugin set tokens.

        Raises:
            DataError: as :meth:`prompt`; DAT24 and DAT25 for the plugin's values.
        """
        metadata = {"row_id": item.id or where, **item.metadata}
        text, tokens = item.prompt, list(item.tokens)
        place = item.where or where
        prompt = Prompt(id=id, task=task, position=position, label=item.label, metadata=metadata, where=place)
        inputs = plain_inputs(item.multimodal_inputs or {}, where)
        if not tokens:
            content = check_prompt(text, where, "prompt", TRUSTED)
            template = self.template or not isinstance(content, str)
            text, inputs = self._text(content, inputs, metadata.get("tools"), prompt, template=template)
            tokens = self._tokens(text, inputs, where)
        elif isinstance(text, str):
            check_text(text, where)
        return self._filled(replace(prompt, multimodal_inputs=self._references(inputs, where)), text, tokens, where)

    def _filled(self, prompt: Prompt, text: str | list[Message], tokens: list[int], where: str) -> Prompt | None:
        fitted = self.fit(tokens, where, prompt.metadata, whole=bool(prompt.multimodal_inputs))
        return None if fitted is None else replace(prompt, prompt=text, tokens=fitted)

    def fit(self, tokens: list[int], where: str, metadata: dict[str, Any], *, whole: bool = False) -> list[int] | None:
        """Apply the length policy: None drops, ``truncate`` keeps the last tokens and notes the length.

        A prompt with pictures (``whole``) is dropped where another is truncated.

        Raises:
            DataError: DAT24 no tokens, DAT26 under the policy ``error``.
        """
        if not tokens:
            raise empty(where)
        if not self.limit or len(tokens) <= self.limit:
            return tokens
        if self.overlong == "drop" or (whole and self.overlong == "truncate"):
            self._count_dropped(len(tokens))
            return None
        if self.overlong == "truncate":
            metadata["prompt_tokens"] = len(tokens)
            return tokens[-self.limit :]
        raise self._too_long("the prompt", len(tokens), where)

    def _count_dropped(self, length: int) -> None:
        shortest, longest = self.dropped
        self.dropped = min(shortest or length, length), max(longest, length)

    def _too_long(self, subject: str, length: int, where: str) -> DataError:
        return DataError(
            f"{subject} has {length} tokens, more than {self.limit}",
            code="DAT26",
            where=where,
            fix=f"{self.wider}\nor set data.overlong_prompt to drop or truncate",
        )


def expanded_reply(reply: EncodedReply, media: MediaProcessor, inputs: MediaInputs, where: str) -> EncodedReply:
    """A reply whose prompt and turns have placeholders expanded, which are not trained."""
    before = len(reply.prompt)
    runs = media.runs([*reply.prompt, *reply.tokens], inputs, where)
    mask = [one if len(run) == 1 else 0 for run, one in zip(runs[before:], reply.loss_mask, strict=True) for _ in run]
    return EncodedReply(prompt=[*chain(*runs[:before])], tokens=[*chain(*runs[before:])], loss_mask=mask)


def access_of(data: DataSection) -> Access:
    """What the rows of a config's data may name."""
    folder = Path(data.media_folder) if data.media_folder else None
    return Access(folder, limits_of(data))


def limits_of(data: DataSection) -> MediaLimits:
    """The largest picture and file, and the addresses that may be fetched."""
    return MediaLimits(pixels=data.max_image_pixels, nbytes=data.max_media_bytes, addresses=data.media_addresses)


def no_reply(where: str) -> DataError:
    """DAT18: a row of an offline stage without a reply."""
    return DataError(
        "the row has no reply to train on",
        code="DAT18",
        where=where,
        why="the prompt is a text, and no label is read",
        fix="set data.label_key to the column of the answers, or data.input_key to one of conversations (messages)",
    )


def _shared(replies: tuple[str | list[Message], ...], where: str) -> list[Message]:
    """The messages with which both conversations of a pair begin."""
    count = 0
    one, other = (reply if isinstance(reply, list) else [] for reply in replies)
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    if not count:
        raise DataError(
            "the two replies share no prompt",
            code="DAT18",
            where=where,
            why="there is no prompt column, and the two conversations begin with different messages",
            fix="set data.input_key to the column of the prompt",
        )
    return one[:count]


def empty(where: str) -> DataError:
    """DAT24: a prompt without a token."""
    return DataError(
        "the prompt is empty",
        code="DAT24",
        where=where,
        why="a response needs a token before it",
        fix="fix the row, or skip such rows with data.max_bad_rows",
    )


def check_id(value: Any, where: str) -> str:
    """A row's own id, unchanged: any text or number that could not be taken for a path.

    Raises:
        DataError: DAT24 another type, DAT34 an id with path parts, control characters or too many characters.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise DataError(f"the id is {json.dumps(value)[:40]}, not a string or number", code="DAT24", where=where)
    text = str(value)
    parts = text.replace("\\", "/").split("/")
    bad = not text or len(text) > MAX_ID or text[0] in "/\\~" or ".." in parts or any(ord(c) < 32 for c in text)
    if bad:
        raise DataError(
            f"the id {text[:60]!r} could be taken for a path",
            code="DAT34",
            where=where,
            why=f"an id is 1 to {MAX_ID} characters, without '..', a leading '/' or '~', or control characters",
            fix="give the row another id, or set data.id_key to another column",
        )
    return text


def _metadata(value: Any, key: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    raise DataError(
        f"the metadata is a {type(value).__name__}, not an object",
        code="DAT24",
        where=f"{where}: {key}",
        fix="make it a JSON object, or set data.metadata_key to another column",
    )


def _media(row: dict[str, Any], keys: Keys, where: str, access: Access) -> MediaInputs:
    """The references of a row's columns, by kind; none where the row lacks one, or has null there."""
    media: MediaInputs = {}
    for kind, column in keys.media.items():
        value = row.get(column)
        items = value if isinstance(value, list) else [] if value is None else [value]
        media[kind] = [checked(item, f"{where}: {column}[{number}]", access) for number, item in enumerate(items)]
    return media


def _tools(value: Any, key: str, where: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"the tools are not JSON: {error}", code="DAT24", where=f"{where}: {key}", fix="store a JSON list"
            ) from error
        check_value(value, where)
    if value is None or isinstance(value, list):
        return value
    raise DataError(
        f"the tools are a {type(value).__name__}, not a list",
        code="DAT24",
        where=f"{where}: {key}",
        fix="store a list of tool definitions, or unset data.tool_key",
    )


def _maybe(hint: str) -> str:
    return f" ({hint})" if hint else ""
