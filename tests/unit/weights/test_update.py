"""Updates of a small engine that speaks route, load and fingerprints: what goes wrong on the way stops the next step."""

import asyncio

import numpy as np
import pytest
import torch
from small_engine import HIDDEN, VOCAB, Rank, hf_tensors, small_config

from durability.fake_trainer import FakeTrainer
from slime_core.config.load import load_config
from slime_core.errors import EngineError
from slime_core.notices import notices_to
from slime_core.testing.fakes import FakeEngine
from slime_core.types import RankTensor, WeightRoute, WeightUpdate
from slime_core.weights import logprob_check
from slime_core.weights.canary import Choice, merged
from slime_core.weights.hashing import checksum, expected
from slime_core.weights.logprob_check import Band, LogprobCheck, differences, probe, random_tokens
from slime_core.weights.update import Canary, sync_weights
from slime_sglang.layout import layout

pytestmark = pytest.mark.unit


def log_probs(embed, qkv, head, tokens, q_rows):
    """[n - 1] plain log-probs of each token after the one before: a model of one bilinear layer."""
    q, k = qkv[:q_rows], qkv[q_rows : q_rows + 6]
    hidden = embed[tokens[:-1]] @ (torch.eye(HIDDEN) + q[:6].T @ k)
    return torch.log_softmax(hidden @ head.T, dim=-1).gather(1, tokens[1:, None])[:, 0].numpy()


class SmallEngine:
    """One server of ``tp`` ranks, or several servers that hold the same."""

    def __init__(self, config, tp=1, servers=1, abilities=("score",), keeps_head=False):
        self.abilities, self.version, self.epoch = frozenset(abilities), -1, 1
        self.config, self.tp = config, tp
        self.servers = [[Rank(config, n, tp, keeps_head=keeps_head) for n in range(tp)] for _ in range(servers)]
        self.fault = lambda tensors, server: tensors
        self.choice = None
        self.asked: list[str] = []  # kinds of check
        self.start(hf_tensors(config, seed=99))

    def start(self, tensors):
        """What a server has read from its own folder."""
        for server in self.servers:
            for rank in server:
                for name, tensor in tensors.items():
                    rank.take(name, tensor)

    def names(self):
        """As `/weights_checker` tells them."""
        return list(self.servers[0][0].tensors)

    async def route(self, check):
        self.asked.append(check)
        self.choice = self.choice or Choice(layout(self.names(), self.config, self.tp))
        return WeightRoute(transport="disk", dtype="float32", checks=self.choice.take(check))

    async def load(self, update):
        for number, server in enumerate(self.servers):
            sent = self.fault(dict(update.tensors), number)
            for rank in server:
                for name, tensor in sent.items():
                    rank.take(name, tensor)
        self.version = update.version

    async def fingerprints(self):
        return merged({f"server {n}": self._told(server) for n, server in enumerate(self.servers)})

    def _told(self, server):
        return {
            name + (f"@{rank.rank}" if rank.rank else ""): checksum(tensor)
            for rank in server
            for name, tensor in rank.tensors.items()
        }

    async def score(self, tokens, start, media=None, adapter=""):
        ranks = [rank.tensors for rank in self.servers[0]]
        embed = torch.cat([held["model.embed_tokens.weight"] for held in ranks])
        head = torch.cat([held.get("lm_head.weight", held["model.embed_tokens.weight"]) for held in ranks])
        qkv = ranks[0]["model.layers.0.self_attn.qkv_proj.weight"]
        return log_probs(embed, qkv, head[:VOCAB], torch.tensor(tokens), 24 // self.tp)[start - 1 :]


class SmallTrainer:
    """Holds the Hugging Face tensors; a step changes all of them."""

    def __init__(self, config, seed=0):
        self.config, self.tensors = config, hf_tensors(config, seed)
        self.routes, self.roles = [], []
        self.rounding = {}  # role -> how far bfloat16 moves each log-prob, up and down in turn

    def step(self):
        self.tensors = {name: tensor + 0.01 * tensor.sin() + 0.001 for name, tensor in self.tensors.items()}

    async def publish(self, version, route=None):
        self.routes.append(route)
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        fingerprints = expected(tensors, route.checks, torch.float32) if route else {}
        return WeightUpdate(version=version, epoch=1, transport="small", tensors=tensors, fingerprints=fingerprints)

    async def score(self, batch, roles):
        self.roles.append(set(roles))
        found, names = [], {which: f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkv"}
        embed = self.tensors["model.embed_tokens.weight"]
        qkv = torch.cat([self.tensors[name] for name in names.values()])
        for n in range(len(batch)):
            tokens = torch.from_numpy(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]]).long()
            found.append(log_probs(embed, qkv, self.tensors.get("lm_head.weight", embed), tokens, 24))
        values = np.concatenate(found)
        turns = np.where(np.arange(len(values)) % 2, 1, -1).astype(np.float32)
        return {role: {"log_probs": values + self.rounding.get(role, 0) * turns} for role in roles}


def canary_of(context_len=0, **changes):
    keys = {"train.dtype": "float32", **changes}
    config = load_config(None, [f"{name}={value}" for name, value in keys.items()])
    return Canary(config=config, vocab_size=VOCAB, context_len=context_len)


class Run:
    """Steps and updates, as a stage makes them."""

    def __init__(self, config=None, tp=1, servers=1, keeps_head=False, **changes):
        config = config or small_config()
        self.trainer = SmallTrainer(config)
        self.engine = SmallEngine(config, tp, servers, keeps_head=keeps_head)
        self.canary, self.version = canary_of(**changes), -1

    def sync(self):
        """One more version; the first is version 0, with fresh weights."""
        if self.version >= 0:
            self.trainer.step()
        self.version += 1
        check = self.canary.check(self.version, first=self.version == 0)

        async def update():
            await sync_weights(self.trainer, self.engine, self.version, canary=self.canary, check=check)
            await self.canary.compare_log_probs(self.engine)

        asyncio.run(update())
        return self.canary.pop_metrics()

    def fails(self, fault, *, after=2):
        """The error of the first update with a fault, after some good ones."""
        for _ in range(after):
            self.sync()
        self.engine.fault = fault
        with pytest.raises(EngineError) as error:
            self.sync()
        assert error.value.code == "ENG83"
        return error.value


# -- what is compared when


def test_the_first_update_and_checkpoints_compare_all_and_others_a_few_in_turn():
    run = Run(**{"report.save_interval": 3})
    for _ in range(7):
        run.sync()
    assert run.engine.asked == ["all", "rolling", "rolling", "all", "rolling", "rolling", "all"]


@pytest.mark.parametrize(("how", "asked"), [("all", ["all", "all"]), ("off", ["none", "none"])])
def test_check_weights_chooses(how, asked):
    run = Run(**{"rollout.check_weights": how})
    for _ in range(2):
        run.sync()
    assert run.engine.asked == asked


def test_the_last_update_of_a_stage_compares_all():
    assert canary_of().check(7, last=True) == "all"
    assert canary_of().check(7) == "rolling"
    assert canary_of(**{"rollout.check_weights": "off"}).check(7, last=True, first=True) == "none"


@pytest.mark.parametrize(
    ("how", "said"),
    [("off", "check_weights is off"), ("all", "they give no checksums of their tensors, or none that are known here")],
)
def test_a_notice_says_when_no_tensor_is_compared(how, said):
    notes = []
    run = Run(**{"rollout.check_weights": how})
    run.engine.choice = type("Nothing", (), {"take": lambda self, check: ()})()
    with notices_to(notes.append):
        run.sync()
        run.sync()
    assert [note for note in notes if said in note] == [
        f"weights of the servers are not compared byte by byte: {said}"
    ]


SHORT = {"rollout.rollout_max_context_len": 9, "rollout.rollout_max_response_len": 4}


@pytest.mark.parametrize(("keys", "tokens"), [({}, 24), (SHORT, 9)])
def test_prompts_of_the_check_fit_a_context_of_few_tokens(keys, tokens):
    run = Run()
    run.canary = canary_of(24, **keys)
    run.sync()
    assert set(np.diff(run.canary._logprob_check.batch.offsets)) == {tokens}


def test_good_updates_pass_and_are_measured():
    run = Run(tp=2, servers=2)
    all_of_them = run.sync()
    assert all_of_them["canary/tensors"] == 2 * (3 * 8 + 3)
    assert all_of_them["canary/logprob_diff_mean"] <= all_of_them["canary/logprob_diff_max"] < 1e-5
    assert 0 <= all_of_them["canary/kl"] < 1e-9
    assert all_of_them["canary/band"] == logprob_check.FIRST["float32"]
    assert all_of_them["canary/compare_seconds"] > 0
    assert run.sync()["canary/tensors"] == 2 * (8 + 3)
    assert run.canary.pop_metrics() == {}


def test_an_engine_without_a_route_is_compared_by_hugging_face_names():
    """The embedded engine: nothing else changes for it."""
    trainer, engine, canary = FakeTrainer(), FakeEngine(vocab_size=VOCAB), canary_of()
    asyncio.run(sync_weights(trainer, engine, 3, canary=canary))
    asyncio.run(canary.compare_log_probs(engine))
    assert canary.pop_metrics() == {}
    engine.load = lambda update: asyncio.sleep(0, setattr(engine, "version", update.version))
    trainer.weights["head"] = trainer.weights["head"] + 1
    with pytest.raises(EngineError, match=r"1 tensors of the engine differ from the trainer's version 4: .'head'"):
        asyncio.run(sync_weights(trainer, engine, 4, canary=canary))


def test_an_engine_that_serves_another_version_is_refused():
    run = Run()
    run.engine.load = lambda update: asyncio.sleep(0, setattr(run.engine, "version", update.version - 1))
    with pytest.raises(EngineError, match="serves version -1 after version 0 was loaded"):
        run.sync()


def test_an_engine_that_cannot_score_is_compared_on_its_tensors_alone():
    run = Run()
    run.engine.abilities = frozenset()
    assert set(run.sync()) == {"canary/tensors", "canary/compare_seconds"}


def test_a_run_that_trains_nothing_is_compared_on_its_tensors_alone():
    """debug_rollout_only: its trainer hands out weights and scores nothing."""
    run = Run(**{"rollout.debug_rollout_only": "true"})
    run.trainer.score = None
    assert set(run.sync()) == {"canary/tensors", "canary/compare_seconds"}


def test_without_a_stages_canary_tensors_are_compared_all_the_same():
    trainer, engine = SmallTrainer(small_config()), SmallEngine(small_config())
    asyncio.run(sync_weights(trainer, engine, 1))
    engine.fault = lambda tensors, server: {}
    trainer.step()
    with pytest.raises(EngineError, match="27 of 27 tensors"):
        asyncio.run(sync_weights(trainer, engine, 2))


# -- faults, each caught by the update that has it


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stale_engine(tp):
    """It takes the update, says the version, and changes nothing."""
    error = Run(tp=tp).fails(lambda tensors, server: {})
    assert "the engine is stale, the update changed nothing" in error.why


def test_a_stale_server_of_three_is_named():
    error = Run(servers=3).fails(lambda tensors, server: {} if server == 1 else tensors)
    assert "the engine is stale" in error.why
    assert error.where == "server 1, rank 0"


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_missing_shard(after):
    """Half of the model's files, wherever the rolling choice stands."""

    def half(tensors, server):
        return dict(list(tensors.items())[len(tensors) // 2 :])

    assert "did not arrive" in Run().fails(half, after=after).why


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("order", [("k", "q", "v"), ("q", "v", "k"), ("v", "q", "k")])
def test_swapped_q_k_and_v(order, after):
    """In all layers, as a wrong mapping would; with as many key heads as query heads, so that sizes fit."""

    def swapped(tensors, server):
        names = {name: name.replace(f"{a}_proj", f"{b}_proj") for a, b in zip("qkv", order) for name in tensors
                 if f".{a}_proj." in name}  # fmt: skip
        return {name: tensors[names.get(name, name)] for name in tensors}

    config = small_config(num_key_value_heads=4)
    error = Run(config).fails(swapped, after=after)
    assert (
        f"holds {', '.join(f'{name}_proj' for name in order)} in this order, not q_proj, k_proj, v_proj" in error.why
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_output_embedding_that_is_not_synced(tp):
    """The engine keeps one of its own, and takes new input embeddings alone."""
    run = Run(small_config(tie_word_embeddings=True), tp=tp, keeps_head=True)
    run.sync()
    for server in run.engine.servers:
        for rank in server:
            rank.keeps_head = False
    run.trainer.step()
    with pytest.raises(EngineError) as error:
        run.sync()
    assert "the output embedding, which is tied, was not synced with the input embedding" in error.value.why
    assert "lm_head.weight" in error.value.what


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_partial_bucket(after):
    """The end of one bucket: a layer's worth of neighbours."""

    def cut(tensors, server):
        names = list(tensors)
        gone = [n for n, name in enumerate(names) if ".layers.1." in name]
        return {name: tensors[name] for n, name in enumerate(names) if n not in gone}

    error = Run().fails(cut, after=after)
    assert "neighbours, model.layers.1." in error.why or "left them out" in error.why
    assert "model.layers.1." in error.what


def test_one_changed_bit_of_a_tensor_is_found_within_a_few_steps():
    """The engine damages the same tensor in every update."""
    run = Run()
    run.sync()
    steps = run.engine.choice.steps
    for name in list(run.trainer.tensors)[::3]:
        run = Run()
        run.sync()

        def flipped(tensors, server, name=name):
            bits = tensors[name].clone().view(torch.int32)
            bits.view(-1)[-1] ^= 1
            return tensors | {name: bits.view(torch.float32)}

        run.engine.fault = flipped
        with pytest.raises(EngineError, match=r"1 of (11|27) tensors"):
            [run.sync() for _ in range(steps)]


def test_weights_that_both_sides_agree_on_and_compute_differently():
    """Checksums are equal; the engine multiplies in another order. Log-probs tell, with the prompt and the token."""
    run = Run()
    honest = run.engine.score
    for _ in range(5):
        run.sync()

    async def score(tokens, start):  # as of a plugin's engine that knows no adapters
        found = (await honest(tokens, start)).copy()
        if tokens[0] == run.canary._logprob_check.batch.tokens[2 * logprob_check.LENGTH]:
            found[6] -= 8.0
        return found

    run.engine.score = score
    with pytest.raises(EngineError) as error:
        run.sync()
    assert error.value.code == "ENG83"
    batch = run.canary._logprob_check.batch
    assert error.value.where.startswith(f"prompt canary/2, token 7 (id {batch.tokens[2 * logprob_check.LENGTH + 7]})")
    assert "the band is 2e-05" in error.value.what
    assert "--canary-band" in error.value.fix


def test_without_checksums_log_probs_still_tell_swapped_weights():
    """check_weights off."""

    def swapped(tensors, server):
        embed, head = "model.embed_tokens.weight", "lm_head.weight"
        return tensors | {embed: tensors[head], head: tensors[embed]}

    error = Run(**{"rollout.check_weights": "off"}).fails(swapped)
    assert "log-probs of trainer and engine differ" in error.what


# -- prompts and the band


def test_prompts_are_pieces_of_the_runs_text():
    text = list(range(1000, 1000 + logprob_check.PROMPTS * logprob_check.LENGTH))
    batch = probe(text, 4096)
    assert batch.tokens.tolist() == text
    assert batch.lengths.tolist() == [logprob_check.LENGTH] * logprob_check.PROMPTS
    assert batch.temperature is None  # scored at 1


def test_of_several_adapters_each_has_prompts_and_one_that_is_stale_is_named():
    names = ("solver", "critic", "judge")
    assert probe([1, 2], 8, names).models == ["solver", "critic", "judge"] * 2 + ["solver", "critic"]
    assert len(probe([1, 2], 8, [str(n) for n in range(20)])) == 20
    stale: set[str] = set()
    broken: set[str] = set()
    scored = []

    class Trainer:
        async def score(self, batch, roles):
            return {"policy": {"log_probs": np.full(len(batch.loss_mask), -1.0, np.float32)}}

    class Adapters:
        async def score(self, tokens, start, media=None, adapter=""):
            scored.append(adapter)
            return np.full(len(tokens) - start, np.nan if adapter in broken else -1.0 - 0.01 * (adapter in stale))

    check = LogprobCheck(probe([1, 2], 8, names), Band("float32"))
    asyncio.run(check.ask(Trainer()))
    assert asyncio.run(check.compare(Adapters(), 1))["canary/logprob_diff_mean"] == 0
    assert scored == check.batch.models
    stale.add("judge")
    asyncio.run(check.ask(Trainer()))
    with pytest.raises(EngineError, match=r"differ by 0\.01 on average") as error:
        asyncio.run(check.compare(Adapters(), 2))
    assert error.value.where.startswith("adapter judge, prompt canary/2")
    broken.add("judge")
    with pytest.raises(EngineError, match="differ by nan on average"):
        asyncio.run(check.compare(Adapters(), 3))


def test_a_run_is_asked_about_its_own_text():
    run = Run()
    asked = []
    run.canary.text = lambda count: asked.append(count) or [5, 6, 7]
    run.sync()
    assert asked == [logprob_check.PROMPTS * logprob_check.LENGTH]
    assert run.canary._logprob_check.batch.tokens[:4].tolist() == [5, 6, 7, 5]  # a short text is repeated


def test_without_prompts_ids_are_a_function_of_the_seed_and_spread_over_the_vocabulary():
    one, same, other = random_tokens(7, 151936), random_tokens(7, 151936), random_tokens(8, 151936)
    assert (one == same).all()
    assert (one != other).any()
    parts = np.sort(one) * len(one) // 151936
    assert (parts == np.arange(len(one))).all()
    run = Run()
    run.sync()
    assert run.canary._logprob_check.batch.tokens.tolist() == random_tokens(run.canary.config.seed, VOCAB).tolist()


@pytest.mark.parametrize(("vocab", "context", "length"), [(3, 4096, 32), (99, 9, 9), (99, 1, 2)])
def test_prompts_fit_any_vocabulary_and_context(vocab, context, length):
    batch = probe(random_tokens(0, vocab), context)
    assert batch.lengths.tolist() == [length] * logprob_check.PROMPTS
    assert len(batch.loss_mask) == batch.response_offsets[-1] == logprob_check.PROMPTS * (length - 1)
    assert 0 <= batch.tokens.min() <= batch.tokens.max() < vocab


def test_differences_are_the_formulas_values():
    """d = log p - log q of two tokens, 0.5 and -1: exp(d) - 1 - d is 0.14872 and 0.36788."""
    found = differences(np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32))
    assert found["canary/logprob_diff_mean"] == 0.75
    assert found["canary/logprob_diff_max"] == 1.0
    assert found["canary/kl"] == pytest.approx((0.1487212707 + 0.3678794412) / 2)


def test_the_band_begins_with_the_dtypes_and_narrows_to_what_the_run_shows():
    band = Band("bfloat16")
    for difference in (0.003, 0.009, 0.004):
        assert band.limit == 0.05
        band.add(difference)
    band.add(0.005)
    assert band.limit == pytest.approx(8 * 0.0045)
    for _ in range(40):
        band.add(1e-6)
    assert band.limit == 0.02


def test_differences_that_were_seen_on_a_gpu_pass_from_the_first_update_on():
    """SGLang 0.5.12, bfloat16, 0.6B and 4B: means of 0.003 to 0.009; ten times the usual one does not pass."""
    band = Band("bfloat16")
    for n in range(100):
        mean = (0.003, 0.009, 0.005)[n % 3]
        assert 2 * mean <= band.limit
        band.add(mean)
    assert band.limit <= 0.05


def test_a_mixture_of_experts_has_a_wider_band():
    dense, mixture = Band("bfloat16"), Band("bfloat16", mixture=True)
    assert mixture.limit == logprob_check.MIXTURE * dense.limit
    for _ in range(10):
        mixture.add(1e-6)
    assert mixture.limit == logprob_check.MIXTURE * logprob_check.FLOOR["bfloat16"]


def test_a_mixture_of_experts_is_recognised_by_the_engines_tensors():
    run = Run()
    held = RankTensor(name="model.layers.0.mlp.experts.w13_weight", pieces=())
    route = WeightRoute(transport="disk", dtype="bfloat16", checks=(held,))
    asyncio.run(run.canary.ask_trainer(run.trainer, run.engine, route))
    assert run.canary._logprob_check.band.limit == logprob_check.MIXTURE * logprob_check.FLOOR["bfloat16"]


def test_the_running_band_is_never_wider_than_the_dtypes():
    band = Band("float32")
    for _ in range(10):
        band.add(9e-4)
    assert band.limit == logprob_check.FIRST["float32"]


def test_a_band_of_the_config_stands():
    band = Band("float32", 0.7)
    for _ in range(10):
        band.add(1e-6)
    assert band.limit == 0.7


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_log_probs_that_are_not_finite_are_outside_every_band(bad):
    run = Run(**{"rollout.canary_band": 1e9})

    async def score(tokens, start, media=None, adapter=""):
        return np.full(len(tokens) - start, bad, np.float32)

    run.engine.score = score
    with pytest.raises(EngineError, match=r"log-probs of trainer and engine differ by (nan|inf)"):
        run.sync()


class Rounded(Run):
    """Both sides compute in bfloat16, which moves log-probs of the trainer's and of the engine's by so much."""

    def __init__(self, trainers, engines, **changes):
        super().__init__(**{"train.dtype": "bfloat16", **changes})
        self.trainer.rounding = {"bfloat16": trainers, "policy": trainers}
        honest = self.engine.score

        async def score(tokens, start, media=None, adapter=""):
            return (await honest(tokens, start)) + np.float32(engines)

        self.engine.score = score


def test_the_first_band_is_what_rounding_does_to_the_trainers_own_model():
    """SmolLM2-135M on a CPU: 0.06 by rounding, 0.07 to 0.1 between transformers and SGLang."""
    run = Rounded(0.06, 0.1)
    assert run.sync()["canary/band"] == pytest.approx(4 * 0.06, abs=1e-4)
    assert run.sync()["canary/band"] == pytest.approx(4 * 0.06, abs=1e-4)
    assert run.trainer.roles == [{"policy", "float32", "bfloat16"}, {"policy"}]


def test_the_first_band_is_neither_below_the_floor_nor_above_the_ceiling():
    assert Rounded(1e-4, 1e-4).sync()["canary/band"] == logprob_check.FLOOR["bfloat16"]
    assert Rounded(0.4, 0.0).sync()["canary/band"] == logprob_check.CEILING


def test_where_rounding_is_not_measured_the_band_is_the_dtypes():
    run = Run(**{"train.dtype": "bfloat16"})
    score = run.trainer.score

    async def of_a_model_too_large_for_it(batch, roles):
        return {"policy": (await score(batch, roles))["policy"]}

    run.trainer.score = of_a_model_too_large_for_it
    assert run.sync()["canary/band"] == logprob_check.FIRST["bfloat16"]
    run.sync()
    assert run.trainer.roles[1] == {"policy"}


@pytest.mark.parametrize("keys", [{"train.dtype": "float32"}, {"train.dtype": "bfloat16", "rollout.canary_band": 2.0}])
def test_rounding_is_measured_only_where_it_decides(keys):
    run = Run(**keys)
    run.sync()
    assert run.trainer.roles == [{"policy"}]


def test_a_difference_beyond_what_rounding_does_is_told_beside_it():
    run = Rounded(0.06, 0.6)
    with pytest.raises(EngineError) as error:
        run.sync()
    assert "rounding to bfloat16 moves the trainer's own by 0.06" in error.value.why


@pytest.mark.parametrize(("check", "after"), [("rolling", 0), ("rolling", 2), ("off", 0)])
@pytest.mark.parametrize("fault", ["stale", "missing", "swapped"])
def test_faults_are_caught_at_once_whatever_rounding_does(fault, check, after):
    """Where checksums are off, by log-probs alone: of weights that a server had read from its own folder."""

    def damage(tensors, server):
        embed, head = "model.embed_tokens.weight", "lm_head.weight"
        if fault == "stale":
            return {}
        if fault == "missing":
            return {name: tensor for name, tensor in tensors.items() if name != head}
        return tensors | {embed: tensors[head], head: tensors[embed]}

    Rounded(0.2, 0.2, **{"rollout.check_weights": check}).fails(damage, after=after)


def test_a_comparison_needs_the_trainers_side():
    with pytest.raises(AssertionError, match="ask the trainer first"):
        asyncio.run(LogprobCheck(probe([1, 2], 8), Band("float32")).compare(FakeEngine(), 1))
