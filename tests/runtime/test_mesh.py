"""Which ranks may share an operator."""

import pytest

from terapipe import Layout
from terapipe.runtime.mesh import check_hosts


def test_parts_of_one_host_are_accepted() -> None:
    check_hosts(Layout(2, 1, 2), ["a", "a", "b", "b"])
    check_hosts(Layout(1, 3, 1), ["a", "b", "a"])


def test_an_operator_over_two_hosts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="of one host, got ranks 2 to 3 on a, b for dp 1 x pp 2 x tp 2; take a"):
        check_hosts(Layout(1, 2, 2), ["a", "a", "a", "b"])
