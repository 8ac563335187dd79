"""Written as for THUDM/slime: data sources of one's own, from nothing and over slime's."""

from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample


class Sums(DataSource):
    def __init__(self, args):
        self.args, self.position = args, 0

    def get_samples(self, num_samples):
        return [self._group() for _ in range(num_samples)]

    def _group(self):
        first = self.position * self.args.n_samples_per_prompt
        self.position += 1
        fields = {"prompt": f"{self.position}+1=", "label": "7", "group_index": self.position - 1}
        return [Sample(index=first + number, **fields) for number in range(self.args.n_samples_per_prompt)]

    def add_samples(self, samples):
        raise RuntimeError("read-only")

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 100


class Longest(RolloutDataSourceWithBuffer):
    """The rows of --prompt-data, the longest prompts first."""

    def __init__(self, args):
        super().__init__(args)
        self.dataset.samples.sort(key=lambda sample: -len(sample.prompt))
