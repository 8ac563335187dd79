"""Ranks that tests fork see the environment and the folder of the test, as those do that are started."""

import asyncio

from forked_channel import start_forked

from slime_core.clusters.channel import Child

SAYS = "import os\nprint(os.environ.get('OF_ONE'), os.environ.get('OF_OTHER'), os.getcwd(), flush=True)\n"


def test_a_fork_has_the_environment_and_the_folder_of_the_time_it_is_started(tmp_path, monkeypatch):
    (tmp_path / "says_where.py").write_text(SAYS)
    monkeypatch.syspath_prepend(tmp_path)

    async def fork(name):
        channel = await start_forked(0, Child(module="says_where", log=tmp_path / name, env={"OF_OTHER": name}))
        await asyncio.to_thread(channel._process.wait)
        channel._writer.close()
        return (tmp_path / name).read_text().split()

    monkeypatch.setenv("OF_ONE", "1")
    assert asyncio.run(fork("a"))[:2] == ["1", "a"]
    monkeypatch.delenv("OF_ONE")
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(fork("b")) == ["None", "b", str(tmp_path)]
