"""Tools with state: look a number up, then say it. Every look counts in the episode's own state."""

import verifiers.v1 as vf

from phone_book.tools import NUMBERS, BookState, PhoneBook


class PhoneBookData(vf.TaskData):
    who: str


class PhoneBookTask(vf.Task[PhoneBookData, BookState]):
    @vf.reward(weight=0.5)
    async def looked(self, trace: vf.Trace) -> float:
        return float(self.data.who in trace.state.looked_up)

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == NUMBERS[self.data.who])

    @vf.metric
    async def looks(self, trace: vf.Trace) -> float:
        return len(trace.state.looked_up)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3


class PhoneBookTaskConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class PhoneBookTaskset(vf.Taskset[PhoneBookTask, PhoneBookTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [PhoneBook(config.tools)]

    def load(self):
        return [PhoneBookTask(PhoneBookData(prompt=who, who=who), self.config.task) for who in list(NUMBERS) * 4]


__all__ = ["PhoneBookTaskset"]
