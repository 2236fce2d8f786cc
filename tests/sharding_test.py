from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from covsero_jax import model, sharding

CONFIG = model.QwenConfig(
    vocab_size=41, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, tie_embeddings=False
)


def test_every_matrix_is_cut_along_its_embedding_dimension():
    params = model.init_params(CONFIG, jax.random.key(0))
    placed = sharding.put_params(sharding.make_mesh(), params)
    jax.tree.map(np.testing.assert_array_equal, placed, params)
    layer = placed['layers']
    shards = {
        'embed': (placed['embed']['embedding'], (41, 2)),
        'lm_head': (placed['lm_head']['kernel'], (2, 41)),
        'q': (layer['q']['kernel'], (2, 2, 16)),
        'o': (layer['o']['kernel'], (2, 16, 2)),
        'gate': (layer['gate']['kernel'], (2, 2, 24)),
        'down': (layer['down']['kernel'], (2, 24, 2)),
        'bias': (layer['q']['bias'], (2, 16)),
        'norm': (placed['final_norm']['scale'], (16,)),
    }
    for name, (leaf, shape) in shards.items():
        assert {shard.data.shape for shard in leaf.addressable_shards} == {shape}, name


def test_batch_rows_are_split_over_both_axes():
    placed = sharding.put_batch(sharding.make_mesh(data=2), {'x': np.zeros((16, 5))})
    assert placed['x'].sharding.spec == P(('data', 'fsdp'))
    assert {shard.data.shape for shard in placed['x'].addressable_shards} == {(2, 5)}


def test_mesh_takes_what_is_left_or_what_is_asked():
    assert dict(sharding.make_mesh(data=2).shape) == {'data': 2, 'fsdp': 4, 'tensor': 1}
    assert sharding.make_mesh(data=1, fsdp=1).size == 1
    with pytest.raises(ValueError, match='data=4 x fsdp=4 x tensor=1 needs 16 devices, there are 8'):
        sharding.make_mesh(data=4, fsdp=4)


@pytest.mark.parametrize(
    ('tree', 'message'),
    [
        ({'adapter': {'kernel': np.zeros((4, 4))}}, "'adapter/kernel' matches no rule"),
        ({'embed': {'embedding': np.zeros((4, 6))}}, r"'embed/embedding' \(4, 6\): 6 is not divisible by fsdp=8"),
    ],
)
def test_parameters_without_a_place_are_named(tree, message):
    with pytest.raises(ValueError, match=message):
        sharding.put_params(sharding.make_mesh(), tree)


def test_a_batch_that_devices_do_not_divide_is_named():
    with pytest.raises(ValueError, match='a micro-batch of 6 rows cannot be split over 8 devices'):
        sharding.put_batch(sharding.make_mesh(), {'x': np.zeros((6, 3))})
