"""What a judge's inputs are drawn from: a key beside the run, so that it asks the same again and no other run does."""

import asyncio
import stat
from dataclasses import replace

import pytest
from corpus_of_kernels import problem, sources
from dialogue_actors import context

from slime_core.errors import StorageError
from slime_core.testing.fakes import FakeEngine
from slime_kernelbench import run as kernelbench
from slime_kernelbench.dialogue.turns import occasion
from slime_kernelbench.options import Options
from slime_kernelbench.secret import FILE, Secret

RELU = sources("honest")["relu_with_main"]
SPOILED = [RELU.replace("tl.maximum(x, 0.0)", f"tl.maximum(x, {floor})") for floor in (0.5, 0.25, 0.125, -1.0)]


@pytest.mark.unit
def test_a_key_is_kept_for_its_owner_alone_and_is_the_same_when_it_is_read_again(tmp_path):
    one, other = tmp_path / "run" / FILE, tmp_path / "other" / FILE
    numbers = [Secret.load_or_create(path).number("inputs", "add", bits=256) for path in (one, one, other)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert [path.name for path in one.parent.iterdir()] == [FILE.name]
    assert Secret().number("inputs") != Secret().number("inputs")


@pytest.mark.unit
def test_a_secret_of_another_length_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(StorageError, match="key of the judge's inputs") as caught:
        Secret.load_or_create(tmp_path / "secret")
    assert "5 bytes are no key of 32" in caught.value.why


@pytest.mark.unit
def test_a_number_follows_from_the_key_the_purpose_and_every_part_of_what_it_is_about():
    secret, parts = Secret(bytes(range(32))), [("set", "a", "bc"), ("set", "ab", "c"), ("seta", "bc"), ("set", "abc")]
    assert len({secret.number(*words, bits=48) for words in parts}) == 4
    # printf '\0\0\0\0\0\0\0\1x' | openssl dgst -sha256 -mac HMAC -macopt hexkey:000102...1f
    assert secret.number("x", bits=256) == int(X, 16)
    assert secret.number("x", bits=48) == int(X[:12], 16)
    assert X not in f"{secret} {secret!r}"
    assert secret.text not in f"{secret} {secret!r}"


X = "7eeb59b7eb09da2b53a7bbc7208c590f5aab5dcd5f1ab4ec45cc98fc8cffd291"


async def asked(folder, order):
    """What a start of a run in the folder is told of the spoiled kernels, judged in this order."""
    run, ctx = kernelbench.KernelbenchRun(), context(FakeEngine(), None, Options(judge_workers=1))
    judge = run.judge(replace(ctx, run_dir=folder))
    try:
        found = {number: await judge.judge(SPOILED[number], problem("relu")) for number in order}
    finally:
        await run.aclose()
    assert {verdict.status for verdict in found.values()} == {"wrong"}
    return [(found[number].cases, found[number].diagnostics) for number in sorted(found)]


@pytest.mark.nightly
@pytest.mark.integration
def test_a_run_that_goes_on_asks_what_it_asked_and_another_run_asks_something_else(tmp_path):
    every = range(len(SPOILED))
    first = asyncio.run(asked(tmp_path / "run", every))
    again = asyncio.run(asked(tmp_path / "run", [*every][::-1]))
    other = asyncio.run(asked(tmp_path / "other", every))
    assert again == first
    assert all(one != two for one, two in zip(first, other))
    assert len({cases for cases, _ in first}) == len(SPOILED)


LEAKS = RELU.replace("        return ", '        raise ValueError(f"{x}")\n        return ')


@pytest.mark.integration
def test_inputs_that_an_answer_lets_slip_are_not_those_of_the_next_turn_or_version(with_judge):
    async def told(judge):
        problems = [replace(problem("relu"), occasion=occasion) for occasion in ("7.0", "7.1", "8.0", "7.0")]
        return [await judge.judge(f"{LEAKS}# {number}", one) for number, one in enumerate(problems)]

    slips = [verdict.diagnostics[0].message for verdict in with_judge(told)]
    assert len(set(slips[:3])) == 3, slips
    assert slips[3] == slips[0], "one occasion asks every candidate the same"


@pytest.mark.unit
def test_an_occasion_is_a_version_and_a_turn_and_evaluations_are_apart():
    ctx = context(FakeEngine(), None, Options())
    found = [occasion(replace(ctx, version=version), turn) for version in (0, 1) for turn in (0, 1)]
    assert len({*found, occasion(replace(ctx, evaluation=True, version=1), 1)}) == 5
