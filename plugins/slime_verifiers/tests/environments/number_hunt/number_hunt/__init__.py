"""Several turns: find a number; the environment says whether a guess is low or high. Its tasks do not end."""

import itertools

import verifiers.v1 as vf


class NumberHuntData(vf.TaskData):
    number: int


class NumberHuntTask(vf.Task[NumberHuntData]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class NumberHuntEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class NumberHuntEnv(vf.Env[NumberHuntEnvConfig]):
    async def run(self, task, agents):
        closeness = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                digits = "".join(filter(str.isdigit, segment.last_reply))[:1] or "0"
                distance = int(digits) - task.data.number
                closeness = max(closeness, 1 - abs(distance) / 9)
                if not distance:
                    break
                segment = await interaction.turn("low" if distance < 0 else "high")
        interaction.trace.record_reward("closeness", closeness)


class NumberHuntTaskset(vf.Taskset[NumberHuntTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for place in itertools.count():
            yield NumberHuntTask(NumberHuntData(prompt="guess", number=place * 7 % 10), self.config.task)


__all__ = ["NumberHuntEnv", "NumberHuntTaskset"]
