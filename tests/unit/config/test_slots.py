"""How many sequences an embedded engine decodes at once."""

import pytest

from slime_core.config.load import load_config
from slime_core.config.stages import rollout_slots

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        pytest.param("--device cpu", 64, id="a CPU"),
        pytest.param("--device cpu --rollout-slots 7", 7, id="as the config says"),
        pytest.param("--device cuda", 256, id="a step's samples"),
        pytest.param("--device cuda --over-sampling-batch-size 48", 384, id="with those that a filter may drop"),
        pytest.param("--device cuda --rollout-num-engines 3 --max-staleness 1 --no-colocate", 86, id="of one engine"),
        pytest.param("--device cuda --rollout-batch-size 1", 64, id="at least 64"),
        pytest.param("--device cuda --rollout-batch-size 512", 1024, id="at most 1,024"),
    ],
)
def test_a_gpu_serves_a_step_in_one_round(tmp_path, flags, slots):
    config = load_config(None, ["--hf-checkpoint", str(tmp_path), *flags.split()])
    assert rollout_slots(config) == slots
