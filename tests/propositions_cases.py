"""What the propositions are executed on: a tabular softmax policy, a small Qwen, worlds small enough to enumerate."""

from __future__ import annotations

import fractions
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from table_examples import trajectory

from covsero_jax import batch, learner, losses, model, objective, sharding

# ---- a tabular softmax policy: one logit per (observation, next observation) ------------------------------------------

LETTERS = 'abcdefgs'  # all that it observes; its action names the next observation


def random_logits(seed):
    return np.random.default_rng(seed).normal(size=(len(LETTERS), len(LETTERS))).astype(np.float32)


def decisions(rollouts, num_rows):
    """(state, action) of every row in the table's order, padded. int32 [2, N]."""
    steps = [step for members in rollouts for path in members.trajectories for step in path.steps]
    decision_2N = np.zeros((2, num_rows), np.int32)
    for row, step in enumerate(steps):
        decision_2N[:, row] = LETTERS.index(step.observation), LETTERS.index(step.next_observation)
    return decision_2N


@jax.jit
def loss_gradient(logits, decision_2N, advantage_N, row_N):
    """d/d logits of the policy loss at ratio 1 (so nothing is clipped), summed over the marked rows. float32."""

    def loss(logits):
        logprob_N1 = jax.nn.log_softmax(logits)[tuple(decision_2N)][:, None]
        loss_N1 = losses.clipped_policy_loss(logprob_N1, jax.lax.stop_gradient(logprob_N1), advantage_N)
        return losses.masked_sum(loss_N1, row_N[:, None], jnp.ones_like(advantage_N))[0]

    return jax.grad(loss)(logits)


def score_functions(logits, decision_2N):
    """grad log pi of each row from the formula, one-hot(action) - pi in the row of the state. float64 [N, S, S]."""
    probability = np.exp(np.float64(logits))
    probability /= probability.sum(axis=1, keepdims=True)
    scores = np.zeros((decision_2N.shape[1], *logits.shape))
    for row, (state, action) in enumerate(decision_2N.T):
        scores[row, state] = np.eye(len(logits))[action] - probability[state]
    return scores


# ---- a language model and its train step ------------------------------------------------------------------------------

QWEN = model.QwenConfig(
    vocab_size=16, embed_dim=8, mlp_dim=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4
)
POLICY_TERM_ONLY = objective.LossConfig(kl_coef=0.0, entropy_coef=0.0, chunk=3)
QWEN_ROWS = 16


@functools.cache
def qwen():
    """(random tokens, their old log-probs, a state with random weights, the train step)."""
    mesh = sharding.make_mesh(data=1, fsdp=1)
    tx = learner.make_optimizer(learner.OptimizerConfig(learning_rate=1e-2, weight_decay=0.0))
    rng = np.random.default_rng(0)
    prompts, actions = (list(rng.integers(1, QWEN.vocab_size, (QWEN_ROWS, size))) for size in (5, 3))
    tokens = batch.build_tokens(prompts, actions, num_rows=QWEN_ROWS, prompt_len=5, action_len=3)
    state = learner.init_state(jax.random.key(0), QWEN, tx, mesh)
    old_BA = learner.make_logprob_step(QWEN, POLICY_TERM_ONLY, mesh)(state.params, tokens)
    return tokens, jax.device_get(old_BA), state, learner.make_train_step(QWEN, POLICY_TERM_ONLY, tx, mesh)


def qwen_update(advantage_N, row_N):
    """(state, metrics) after one train step on the marked ones of the first QWEN_ROWS rows, always from one state."""
    tokens, old_BA, state, train_step = qwen()
    tokens = tokens.replace(action_mask_BA=tokens.action_mask_BA & row_N[:QWEN_ROWS, None])
    policy = batch.PolicyBatch(tokens=tokens, advantage_B=np.asarray(advantage_N)[:QWEN_ROWS], old_logprob_BA=old_BA)
    return jax.device_get(train_step(jax.tree.map(jnp.copy, state), [policy]))  # a copy: the step donates its state


# ---- random worlds ----------------------------------------------------------------------------------------------------


def episodes(successors, shown, budget) -> Iterator[tuple[str, bool]]:
    """(observations, success) of every way to act for at most `budget` steps from state 0; the last state is the goal.

    successors[state] are the states its actions lead to, shown[state] is the observation. The goal ends an episode.
    """
    ongoing = [(0,)]
    for _ in range(budget):
        ongoing = [(*path, after) for path in ongoing for after in successors[path[-1]]]
        for path in ongoing:
            if path[-1] == len(shown) - 1:
                yield ''.join(shown[state] for state in path), True
        ongoing = [path for path in ongoing if path[-1] != len(shown) - 1]
    for path in ongoing:
        yield ''.join(shown[state] for state in path), False


def required_observations(successors, shown) -> set[str]:
    """The observations beside the first that every success shows: without their states the goal cannot be reached."""
    return {letter for letter in set(shown) - {shown[0]} if not _reachable(successors, shown, without=letter)}


def _reachable(successors, shown, without) -> bool:
    reached, frontier = {0}, [0]
    while frontier:
        for after in successors[frontier.pop()]:
            if after not in reached and shown[after] != without:
                reached.add(after)
                frontier.append(after)
    return len(shown) - 1 in reached


# ---- a chain of two links ---------------------------------------------------------------------------------------------

CHAIN = ('aaa', 'aab', 'abb', 'abs')  # a to b to the goal s in two steps; each step advances or stays where it is
FRONTIER = (LETTERS.index('b'), LETTERS.index('s'))  # the logit of the step that no failure ever takes


def chain_probability(path: str, advance: fractions.Fraction) -> fractions.Fraction:
    """Of one of CHAIN's four rollouts, where every step advances with probability `advance`."""
    moves = [after != before for before, after in itertools.pairwise(path)]
    return advance ** sum(moves) * (1 - advance) ** (len(moves) - sum(moves))


def chain_trajectory(path: str):
    return trajectory(path, success=path.endswith('s'))


def chain_logits():
    """The uniform policy: in a it may go to a or b, in b to b or s."""
    logits = np.full((len(LETTERS), len(LETTERS)), -1e9, np.float32)
    for state, choices in {'a': 'ab', 'b': 'bs'}.items():
        logits[LETTERS.index(state), [LETTERS.index(choice) for choice in choices]] = 0.0
    return logits
