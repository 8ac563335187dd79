"""Dumps of rollouts: what is written comes back as it was, whole or not at all, and stands in a collector's place."""

import asyncio

import numpy as np
import pytest

from durability.memory_ledger import MemoryLedger
from slime_cli.dumps import dumps_of
from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.errors import ConfigError, DataError, PluginError, StorageError
from slime_core.ledger.segments import Segments, read_array
from slime_core.plugins import load_plugins
from slime_core.rollout.dump import Dump, DumpedGroups, DumpHeader, evaluation_path, read_dump, step_path, write_dump
from slime_core.testing.contracts import sample_group
from slime_core.types import Group, Prompt

pytestmark = pytest.mark.unit


def groups_of(*positions, fan_out=True):
    """Groups with every kind of field: fan-out, masks, dict metadata, no array."""
    found = []
    for position in positions:
        group = sample_group(position, fan_out=fan_out)
        for number, sample in enumerate(group.samples):
            sample.rollout_routed_experts = None
            sample.rollout_log_probs = [-0.1 * (number + 1), -1e-7, 0.0]  # doubles that no float32 holds
            sample.metadata = {"reward_terms": {"a": 1.5}, "text": "ü\ud800"}
            sample.weight_versions = [3, 3, -1]
        group.prompt.metadata.update({"row": position})
        found.append(group)
    return found


def plain(groups):
    return [(g.prompt, g.rollouts, [s.to_dict() for s in g.samples]) for g in groups]


def config_of(**keys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in keys.items()]
    return load_config(None, ["--hf-checkpoint", ".", "--rollout-batch-size", "2", *flags])


def test_groups_come_back_bit_for_bit(tmp_path):
    groups = groups_of(0, 7)
    path = step_path(tmp_path / "dump", 1)
    write_dump(path, groups, DumpHeader(version=1))
    assert plain(read_dump(path)) == plain(groups)
    assert path.name == "step-000001.rollout"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing is left beside it


def test_a_file_holds_no_pickle(tmp_path):
    path = step_path(tmp_path, 1)
    write_dump(path, groups_of(0), DumpHeader(version=1))
    head = path.read_bytes()[:8]
    assert head == b"slimeRD1"


def test_arrays_of_the_run_are_copied_and_given_to_the_run_that_reads(tmp_path):
    source, target = tmp_path / "run" / "segments", tmp_path / "other" / "segments"
    writer = Segments(source)
    experts = np.arange(12, dtype=np.int16).reshape(3, 4)
    pixels = np.linspace(0, 1, 6, dtype=np.float32)
    group = groups_of(0, fan_out=False)[0]
    group.samples[0].rollout_routed_experts = writer.write_array(experts)
    inputs = {"pixels": writer.write_array(pixels)}
    for sample in group.samples:
        sample.multimodal_train_inputs = dict(inputs)
    writer.close()
    write_dump(step_path(tmp_path, 1), [group], DumpHeader(version=1), arrays=source)
    for file in source.iterdir():
        file.unlink()  # the run that made them is gone
    reader = Segments(target)
    reader.append([b"something else lies there first"])
    (found,) = read_dump(step_path(tmp_path, 1), arrays=reader)
    reader.close()
    assert np.array_equal(read_array(target, found.samples[0].rollout_routed_experts), experts)
    assert np.array_equal(read_array(target, found.samples[1].multimodal_train_inputs["pixels"]), pixels)
    assert found.samples[0].multimodal_train_inputs == found.samples[1].multimodal_train_inputs
    assert step_path(tmp_path, 1).read_bytes().count(pixels.tobytes()) == 1


@pytest.mark.parametrize("keep", [4, 12, 40, -1], ids=["magic", "frame", "header", "body"])
def test_a_file_that_was_cut_short_is_refused(tmp_path, keep):
    path = step_path(tmp_path, 1)
    write_dump(path, groups_of(0), DumpHeader(version=1))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StorageError, match="STO112"):
        read_dump(path)


def test_every_flipped_bit_is_found(tmp_path):
    path = step_path(tmp_path, 1)
    write_dump(path, groups_of(0), DumpHeader(version=1))
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=r"STO11[23]"):
            read_dump(path)


def test_a_file_of_another_format_is_no_dump(tmp_path):
    path = step_path(tmp_path, 1)
    path.write_bytes(b"PK\x03\x04 and so on, a pickle of torch")
    with pytest.raises(StorageError, match="STO113"):
        read_dump(path)
    with pytest.raises(StorageError, match="STO111"):
        read_dump(step_path(tmp_path, 2))


def test_a_prompt_that_json_cannot_hold_names_itself_and_leaves_no_file(tmp_path):
    group = groups_of(0)[0]
    group.prompt.metadata["thing"] = object()
    with pytest.raises(PluginError, match="PLG57"):
        write_dump(step_path(tmp_path / "dump", 1), [group], DumpHeader(version=1))
    assert not (tmp_path / "dump").exists()


def test_a_run_without_the_key_dumps_nothing(tmp_path):
    dump = Dump(config_of(), tmp_path)
    dump.write(1, "main", groups_of(0))
    dump.write(0, "main", groups_of(0), "set")
    assert (dump.saves, list(tmp_path.iterdir())) == (False, [])


def test_steps_and_evaluations_are_listed_in_order(tmp_path):
    folder = tmp_path / "dump"
    dump = Dump(config_of(save_debug_rollout_data=folder), tmp_path / "run")
    dump.write(2, "grpo", groups_of(2, 3))
    dump.write(1, "warmup", groups_of(0))
    dump.write(1, "warmup", groups_of(5), "held.out")
    rows = dumps_of(folder)
    assert [(row["version"], row["kind"], row["stage"], row["groups"], row["samples"]) for row in rows] == [
        (1, "eval held.out", "warmup", 1, 3),
        (1, "step", "warmup", 1, 3),
        (2, "step", "grpo", 2, 6),
    ]
    assert rows[1]["reward"] == pytest.approx(2 / 3)
    assert evaluation_path(folder, "held.out", 1).name == "eval-held.out-000001.rollout"
    with pytest.raises(StorageError, match="STO111"):
        dumps_of(tmp_path)


def test_a_folder_of_another_run_is_not_written_into(tmp_path):
    config = config_of(save_debug_rollout_data=tmp_path / "dump")
    Dump(config, tmp_path / "run-0").write(1, "main", groups_of(0))
    Dump(config, tmp_path / "run-0").write(1, "main", groups_of(0))  # the same run, that goes on
    with pytest.raises(ConfigError, match="CFG12") as caught:
        Dump(config, tmp_path / "run-1")
    assert "run-0" in str(caught.value)


def take(config, run_dir, versions, ledger, notes=None):
    """The steps of a dump, as the loop takes them."""

    async def go():
        ctx = Context(config=config, version=versions[0] - 1, stage="main")
        said = notes.append if notes is not None else (lambda text: None)
        steps = []
        async with DumpedGroups(ledger, load_plugins(config), ctx, run_dir, said) as collector:
            for version in versions:
                steps.append(await collector.take(2))
                await collector.drain()
                counts = collector.pop_counts()
                assert counts.issued == len(steps[-1])
                collector.admit(version)
        return steps

    return asyncio.run(go())


def dumped(tmp_path, steps=3, stage="main"):
    save = config_of(save_debug_rollout_data=tmp_path / "dump")
    made = [groups_of(2 * step, 2 * step + 1) for step in range(steps)]
    for version, groups in enumerate(made, 1):
        Dump(save, tmp_path / "old").write(version, stage, groups)
    return made, config_of(load_debug_rollout_data=tmp_path / "dump")


def test_a_dump_stands_in_a_collectors_place_and_the_ledger_knows_every_sample(tmp_path):
    made, config = dumped(tmp_path)
    ledger, notes = MemoryLedger(), []
    steps = take(config, tmp_path / "new", [1, 2, 3], ledger, notes)
    assert [plain(step) for step in steps] == [plain(step) for step in made]
    assert {row.state for row in ledger.rows.values()} == {"finished"}
    assert len(ledger.rows) == 18
    assert notes == []


def test_a_run_that_goes_on_takes_the_next_file_and_adds_nothing_twice(tmp_path):
    made, config = dumped(tmp_path)
    ledger = MemoryLedger()
    take(config, tmp_path / "new", [1, 2], ledger)
    steps = take(config, tmp_path / "new", [2, 3], ledger)
    assert [plain(step) for step in steps] == [plain(step) for step in made[1:]]
    assert asyncio.run(ledger.counts())["issued"] == 18


def test_a_dump_that_ends_says_where(tmp_path):
    _, config = dumped(tmp_path, steps=2)
    with pytest.raises(DataError, match="DAT28") as caught:
        take(config, tmp_path / "new", [1, 2, 3], MemoryLedger())
    assert "it holds steps 1 to 2" in str(caught.value)


def test_a_renamed_file_is_refused(tmp_path):
    _, config = dumped(tmp_path, steps=2)
    step_path(tmp_path / "dump", 2).rename(step_path(tmp_path / "dump", 1))
    with pytest.raises(DataError, match="DAT29"):
        take(config, tmp_path / "new", [1], MemoryLedger())


def test_another_stage_and_another_number_of_groups_are_told(tmp_path):
    _, config = dumped(tmp_path, steps=1, stage="warmup")
    notes = []
    Dump(config_of(save_debug_rollout_data=tmp_path / "dump"), tmp_path / "old").write(2, "main", groups_of(8))
    take(config, tmp_path / "new", [1, 2], MemoryLedger(), notes)
    assert notes == [
        "step 1: stage main trains on groups of stage warmup (step-000001.rollout)",
        "step 2: the dump has 1 groups, rollout_batch_size is 2",
    ]


def test_an_empty_group_list_is_a_file_too(tmp_path):
    path = evaluation_path(tmp_path, "none", 0)
    write_dump(path, [], DumpHeader(version=0, set="none"))
    assert read_dump(path) == []
    empty = Group(prompt=Prompt(id="a/0"), samples=[], rollouts={})
    write_dump(path, [empty], DumpHeader(version=0, set="none"))
    assert plain(read_dump(path)) == plain([empty])


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (["--debug-train-only"], "nothing to train on", "--load-debug-rollout-data DIR"),
        (["--debug-rollout-only", "--debug-train-only"], "are both set", "--no-debug-train-only"),
        (["--debug-rollout-only", "--load-debug-rollout-data", "."], "debug_rollout_only with load", "remove one"),
        (
            ["--save-debug-rollout-data", "x", "--load-debug-rollout-data", "."],
            "save_debug_rollout_data with",
            "remove",
        ),
        (["--save-debug-rollout-data", "/d/{rollout_id}.pt"], "a file's name", "--save-debug-rollout-data DIR"),
        (["--load-debug-rollout-data", ".", "--rollout-buffer-url", "http://example"], "rollout_buffer_url", "remove"),
        (["--load-debug-rollout-data", "./nowhere"], "no such file or folder", "load_debug_rollout_data"),
    ],
)
def test_debug_keys_that_contradict_each_other_are_errors_with_the_fix(flags, what, fix):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--hf-checkpoint", ".", *flags])
    assert what in str(caught.value)
    assert fix in str(caught.value)


def test_a_dump_is_enough_to_train_on(tmp_path):
    from slime_core.config.load import read

    read(None, ["--hf-checkpoint", ".", "--load-debug-rollout-data", str(tmp_path)]).require_complete()
    with pytest.raises(ConfigError, match="nothing to train on"):
        read(None, ["--hf-checkpoint", "."]).require_complete()


def test_folders_of_a_recipe_are_its_own(tmp_path, monkeypatch):
    (tmp_path / "r.toml").write_text('[rollout]\nhf_checkpoint = "."\nsave_debug_rollout_data = "dump"\n')
    config = load_config(tmp_path / "r.toml")
    assert config.rollout.save_debug_rollout_data == str(tmp_path / "dump")


def test_the_modes_are_of_the_whole_run(tmp_path):
    (tmp_path / "r.toml").write_text('[[stage]]\nname = "a"\ndebug_rollout_only = true\n')
    with pytest.raises(ConfigError, match="cannot differ between stages"):
        load_config(tmp_path / "r.toml", ["--hf-checkpoint", "."])
