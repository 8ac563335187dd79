"""Rollouts of two turns: the model answers, is shown the problem once more, and answers again; the last answer counts.

The reward is made here: 1 for the right answer in the second turn, and a little for one that was right at once.
"""

from __future__ import annotations

from slime_core.buffer.generator import Story, Task
from slime_core.buffer.service.models import Sequence

AT_ONCE = 0.1


async def two_turns(task: Task) -> Sequence:
    """One rollout: prompt, answer, the prompt's tokens again (which do not train), answer."""
    story = Story(task)
    first = await task.ask(story.tokens)
    story.say(first)
    story.tell(task.tokens)
    second = await task.ask(story.tokens)
    story.say(second)
    right = [turn.finish == "stop" and turn.text.strip() == str(task.label) for turn in (first, second)]
    reward = float(right[1]) + AT_ONCE * float(right[0])
    return story.sequence(reward=reward, first_right=right[0])
