"""Keys of [data], and of a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from slime_core.config.problems import Problem, conflict
from slime_core.config.sections import LIMIT, PROMPTS, Section, key
from slime_core.config.values import typed
from slime_core.errors import nearest


class DataTask(Section):
    """One entry of `[[data.tasks]]`."""

    name: str = Field(description="What Prompt.task says; rewards and metrics are routed and reported by it.")
    prompt_data: str = key("", "JSONL, Parquet or hub data set, with @[a:b] for a slice; or a plugin's.", path="data")
    weight: float = key(1.0, "Share of prompts, relative to the other tasks.", gt=0)
    plugin: str = key("", "The plugin that owns the task.")
    generate: str = key("", "Function by path, module:function or file.py:function.", path="function")
    reward: str = key("", "Function by path, or an rm_type name.", path="function")
    input_key: str = key("", "As data.input_key, for this task.")
    label_key: str = key("", "As data.label_key, for this task.")
    n_samples_per_prompt: int = key(0, "Samples a prompt; 0 takes the section's.", ge=0)
    adapter: str = key("", "Of train.lora_adapters, the one that generates and learns; empty: the first.")

    @model_validator(mode="before")
    @classmethod
    def short_form(cls, data: Any) -> Any:
        """Take ``NAME`` or ``NAME:WEIGHT`` as a task."""
        if not isinstance(data, str):
            return data
        name, colon, text = data.strip().partition(":")
        if not name or name[0] in "[{":
            raise ValueError(f"a task is NAME, NAME:WEIGHT or a table, and {data!r} is none of them")
        weight = typed(text, float) if colon else 1.0
        if isinstance(weight, str):
            raise ValueError(f"a task is NAME or NAME:WEIGHT, and '{text}' is not a number")
        return {"name": name, "weight": weight}


class DataSection(Section):
    """Where prompts come from."""

    prompt_data: str = key(
        "", "JSONL (one object a line), Parquet or hub data set; @[a:b] is a slice.", PROMPTS, path="data"
    )
    input_key: str = key("input", "Column of the prompt: a string, or a list of chat messages.", PROMPTS)
    label_key: str = key("", "Column of the label, handed to the reward.", PROMPTS)
    metadata_key: str = key("metadata", "Column of a JSON object kept in Prompt.metadata.", PROMPTS)
    tool_key: str = key("", "Column of tool definitions for the chat template.", PROMPTS)
    chosen_key: str = key("chosen", "Of dpo_loss: column of the preferred reply, a text or messages.", PROMPTS)
    rejected_key: str = key("rejected", "Of dpo_loss: column of the other reply.", PROMPTS)
    loss_mask_type: Literal["assistant", "last", "qwen", "qwen3", "qwen3_5", "distill_qwen"] = key(
        "assistant",
        "Which turns of a conversation train: all of the assistant, or the last. slime's names: qwen, qwen3 and "
        "qwen3_5 are assistant, distill_qwen is last.",
        PROMPTS,
    )
    id_key: str = key("", "Column of a row's own id; duplicates are errors.", PROMPTS)
    multimodal_keys: dict[str, str] = key(
        {},
        "Kind of media (image, video, audio) to its column; <image> in a prompt takes the next of it.",
        PROMPTS,
    )
    media_folder: str = key(
        "",
        "Folder where references to media start and stay; empty is that of the data file.",
        PROMPTS,
        path="input",
    )
    media_addresses: tuple[str, ...] = key(
        (), "Addresses at and below which rows may name media, such as https://images.example.org/a/.", PROMPTS
    )
    max_image_pixels: int = key(1 << 26, "Largest picture that is decoded.", LIMIT, ge=1)
    max_media_bytes: int = key(1 << 26, "Largest file of media that is read or fetched.", LIMIT, ge=1)
    apply_chat_template: bool = key(False, "Render prompts with the tokenizer's chat template.", PROMPTS)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Keyword arguments of the chat template.", PROMPTS)
    rollout_shuffle: bool = key(False, "A new permutation every epoch, from (seed, epoch).", PROMPTS)
    rollout_max_prompt_len: int = key(0, "Tokens; 0 is what the context leaves.", PROMPTS, ge=0)
    overlong_prompt: Literal["drop", "truncate", "error"] = key(
        "drop", "For longer prompts: drop, truncate or refuse them.", PROMPTS
    )
    max_bad_rows: int = key(0, "Unreadable rows that are skipped, counted and copied out.", LIMIT, ge=0)
    max_line_bytes: int = key(8 << 20, "Longest line of a JSONL file.", PROMPTS, ge=1024)
    tasks: tuple[DataTask, ...] = key((), "Several data sets, with weights and their own functions.", PROMPTS)

    def conflicts(self, plugins: Sequence[str], adapters: Sequence[str]) -> Iterator[Problem]:
        """What cannot hold together; ``plugins`` and ``adapters`` are the names of those that the run has."""
        if self.prompt_data and self.tasks:
            yield conflict(
                "data.prompt_data and [[data.tasks]] are both set",
                ["data.prompt_data", "data.tasks"],
                why="each names what to train on",
                fix="move prompt_data into a [[data.tasks]] entry, or remove one",
            )
        yield from conflicts_of_tasks("data.tasks", self.tasks, plugins, adapters)


def conflicts_of_tasks(
    path: str, tasks: Sequence[DataTask], plugins: Sequence[str], adapters: Sequence[str]
) -> Iterator[Problem]:
    """Tasks of the array at ``path`` that share a name, or whose plugin or adapter the run does not have."""
    names = [task.name for task in tasks]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield conflict(f"two {path} are named '{name}'", [path], fix="rename one of them")
    for task in tasks:
        if task.plugin and task.plugin not in plugins:
            yield conflict(
                f"task '{task.name}' belongs to plugin '{task.plugin}', which the run does not load",
                [path, "plugins"],
                fix=f"--plugin {task.plugin}",
            )
        if task.adapter and task.adapter not in adapters:
            yield conflict(
                f"task '{task.name}' names the adapter '{task.adapter}', and the run has no such",
                [path, "train.lora_adapters"],
                why=f"train.lora_adapters names {', '.join(adapters) or 'none'}",
                fix=nearest(task.adapter, set(adapters)) or f"add '{task.adapter}' to train.lora_adapters",
            )
