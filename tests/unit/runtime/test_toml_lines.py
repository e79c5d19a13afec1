from __future__ import annotations

from proxyd.runtime.toml_lines import key_lines, line_of

TEXT = '''\
top = 1
[agent]   # comment
site = "a"  # not = "b"
"odd key" = 3
deep.er = 4
text = """
fake = 5
[fake]
"""
after = 6

[[link]]
from = "a"
[[link]]
from = "b"
list = [
  "x = 1",
]
[agent.sub]
inner = { a = 1 }
'''


def test_every_key_has_its_line() -> None:
    lines = key_lines(TEXT)
    assert lines[("top",)] == 1
    assert lines[("agent",)] == 2
    assert lines[("agent", "site")] == 3
    assert lines[("agent", "odd key")] == 4
    assert lines[("agent", "deep", "er")] == 5
    assert lines[("agent", "after")] == 10
    assert lines[("link",)] == 12
    assert lines[("link", 0, "from")] == 13
    assert lines[("link", 1)] == 14
    assert lines[("link", 1, "from")] == 15
    assert lines[("agent", "sub", "inner")] == 20
    assert not any("fake" in path for path in lines)


def test_the_nearest_enclosing_key_answers() -> None:
    lines = key_lines(TEXT)
    assert line_of(lines, ("agent", "sub", "inner", "a")) == 20
    assert line_of(lines, ("link", 1, "list", 0)) == 17
    assert line_of(lines, ("link", 1, "absent")) == 14
    assert line_of(lines, ("nothing",)) == 1
    assert line_of({}, ()) == 1
