"""One turn: an answer's share of digits."""

import verifiers.v1 as vf


class DigitShareTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def digits(self, trace: vf.Trace) -> float:
        text = trace.last_reply
        return sum(map(str.isdigit, text)) / max(1, len(text))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class DigitShareConfig(vf.TasksetConfig):
    num_tasks: int = 20
    word: str = "number"


class DigitShareTaskset(vf.Taskset[DigitShareTask, DigitShareConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            data = vf.TaskData(prompt=f"{self.config.word} {number}", system_prompt="digits only")
            yield DigitShareTask(data, self.config.task)


__all__ = ["DigitShareTaskset"]
