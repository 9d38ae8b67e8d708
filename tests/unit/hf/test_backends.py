"""What carries state between slices of Hugging Face models."""

import pytest
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from terapipe.hf.backends import StateCache, ViewCache
from tests.support.hf_models import small

pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.mark.parametrize("backend", ["attention", "cache"])
def test_caches_of_stages_leave_those_of_transformers_alone(backend: str) -> None:
    """Transformers enters subclasses of a cache's layers into its table by themselves, so that of DeepSeek V4 had ours:
    any later cache of such a model, also of a plain one, was made of layers that store nothing."""
    config = small("deepseek_v4").config
    table, plain = dict(DYNAMIC_LAYER_TYPE_MAPPING), [type(layer) for layer in DynamicCache(config=config).layers]
    cache = ViewCache(8, config) if backend == "attention" else StateCache(8, config, range(1))
    shown = cache.states()
    assert table == DYNAMIC_LAYER_TYPE_MAPPING
    assert [type(layer) for layer in DynamicCache(config=config).layers] == plain
    assert [layer._layer_type for layer in shown.layers] == [kind._layer_type for kind in plain]
