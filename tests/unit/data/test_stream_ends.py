"""Commands whose output is a shard: what is run, and that nothing of it stays."""

import pytest

from data.errors import DataError
from data.storage.command import Command
from data.streams.find import find_streams


def test_of_the_braces_of_a_command_only_ranges_are_ours():
    for text in ("awk '{print $1,$2}' list | xargs cat", "cat ${HOME}/a.tar", "{ cat a.tar; }", "cat x-{a,b}.tar, y"):
        assert find_streams(f"pipe:{text}") == [Command(text)]
    found = find_streams("pipe:{ cat ${D}/{a,b}-{08..10}.tar; }")
    assert found == [Command(f"{{ cat ${{D}}/{{a,b}}-{number}.tar; }}") for number in ("08", "09", "10")]
    assert [one.text for one in find_streams("pipe:cat {0..1}/{0..1}")] == [f"cat {a}/{b}" for a in "01" for b in "01"]
    with pytest.raises(DataError, match=r"the range \{3\.\.1\} in .* runs backwards"):
        find_streams("pipe:cat x-{3..1}.tar")
