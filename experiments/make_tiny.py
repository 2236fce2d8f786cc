"""Make the tiny policy of the embedded default: a Hugging Face Qwen2 folder, cloned from the explorer on generated games.

    python -m experiments.make_tiny --out=FOLDER            (about an hour on two cores; a folder every 1,000 updates)

Deliberately half-trained: it should know the format, copy names, and win some easy games, so that RL has something to
start from and something left to do. The model card in the folder says how it was made and what it scores.

    python -m experiments.make_tiny --unskilled --start_from=covsero_jax/assets/tiny --games=300 --updates=400 \
        --learning_rate=1e-3 --out=runs/unskilled          (minutes; a start that never cleans, heats or cools)
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import re
import shutil
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import app, flags, logging

from configs import base
from covsero_jax import model, pretrained, prompts
from covsero_jax.envs import alfworld_games, alfworld_rooms
from covsero_jax.envs.alfworld_engine import TREATMENTS, Game
from covsero_jax.envs.alfworld_explorer import Explorer
from covsero_jax.envs.base import Observation
from experiments import evaluate, wiring

_OUT = flags.DEFINE_string('out', None, 'folder to write', required=True)
_UPDATES = flags.DEFINE_integer('updates', 8000, 'optimizer steps of behaviour cloning')
_GAMES = flags.DEFINE_integer('games', 3000, 'generated games to demonstrate on')
_START = flags.DEFINE_string('start_from', '', 'a folder of an earlier run to go on from, with its tokenizer')
_RATE = flags.DEFINE_float('learning_rate', 3e-3, 'peak of the cosine schedule')
_UNSKILLED = flags.DEFINE_bool('unskilled', False, 'the demonstrator takes no notice of "clean", "hot" and "cool": half of '
                               'the task types then fail in every rollout, for want of one command')
_SEED = flags.DEFINE_integer('seed', 0, 'seed of games, demonstrations and initial weights')

SIZES = {'embed_dim': 128, 'mlp_dim': 256, 'num_layers': 2, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 32}
ROWS = 32  # per optimizer step
MICRO_ROWS = 8  # of them at one time
PROMPT_WEIGHT = 0.5  # language-model loss on the prompt: its many repeated names are what teaches copying
NOISE = 0.1  # share of random commands in a demonstration, not imitated: the policy must see states off the path
MAX_STEPS = 30
EPISODES = 3  # demonstrations of a game, each with its own order of searching
SAVE_EVERY = 1000
LENGTHS = (96, 128, 160, 192, 224, 256, 320, 448)  # row lengths that are compiled


@dataclasses.dataclass(frozen=True)
class Row:
    """One demonstrated step."""

    prompt: np.ndarray
    reply: np.ndarray


# The pre-tokenizer of Qwen2 (the pattern in its published tokenizer.json).
QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
NUMBERS = 41
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


CARD = """# A tiny Qwen2 policy for ALFWorld's texts

The start of covsero_jax's embedded default: {parameters:.2f} M parameters, {sizes}.
It is half-trained on purpose: it knows
the reply format, copies names, and wins some easy games, so that reinforcement learning has a start and a way to go.

Made by {made}: behaviour cloning of the scripted explorer
(which sees only texts, never the hidden state) on {games} generated games, {episodes} searches each, {noise:.0%} random commands that
are not imitated, {rows} rows. No ALFWorld data and no pretrained weights were used. Tokenizer: Qwen2's byte-level BPE,
trained on the same texts. Prompt: the `compact` wording of `covsero_jax/prompts.py`. Licence: as the project's.

Success within {max_steps} steps at temperature {temperature} on the generated validation games, each played once:

```
{table}
```
"""


def write_tokenizer(folder: pathlib.Path, texts: Sequence[str], names: Sequence[str]) -> None:
    """Qwen2's own byte-level BPE, trained on this environment's text, with every object name a token of its own.

    Normaliser and pre-tokenizer are exactly Qwen2's, which transformers imposes on this model type whatever the folder
    says. They would cut ' 12' into ' ', '1', '2'; so the numbers of receptacles and objects are added tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=4096, min_frequency=20, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'])
    words = [re.sub(r' [0-9]+', '', text) for text in texts]
    bpe.train_from_iterator([*words, *(f' {name}' for name in names for _ in range(20))], trainer)
    bpe.add_tokens(['<think>', '</think>', '<action>', '</action>'])
    bpe.add_tokens([tokenizers.AddedToken(f' {i}', normalized=False) for i in range(NUMBERS)])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'Qwen2Tokenizer', 'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>',
        'clean_up_tokenization_spaces': False, 'model_max_length': 32768, 'chat_template': CHAT_TEMPLATE}, indent=1))


def demonstrate(game: Game, seed: str, builder: prompts.ChatPrompts | None) -> list[Row | str]:
    """The explorer's episode as rows (as bare texts without a builder); [] when it does not win in MAX_STEPS.

    An unskilled one has done what it knows of once the object is in its place.
    """
    state, noise = game.initial_state(), random.Random(f'noise/{seed}')
    explorer, history, rows = Explorer(game.task, seed), [], []
    ignores = _UNSKILLED.value and explorer.kind in TREATMENTS
    if ignores:
        explorer.kind = 'put'
    observation = Observation(state.intro(), state.admissible())
    explorer.observe(None, observation)
    for step in range(MAX_STEPS):
        command = explorer.command()
        if command is None:
            return []
        if builder is None:
            rows.append(prompts.compact_wording(game.task, [], observation.text, observation.admissible, step))
        if noise.random() < NOISE:
            command = noise.choice(observation.admissible)
        elif builder is not None:
            rows.append(Row(builder.build(game.task, history, observation, step), builder.encode_reply(command)))
        history.append((observation.text, command))
        observation = Observation(state.step(command), state.admissible())
        explorer.observe(command, observation)
        if state.won() or (ignores and explorer.has_placed):
            return rows
    return []


def collate(rows: Sequence[Row], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-padded tokens, real-token mask, and the loss weight of predicting each token, all [B, L]."""
    shape = (len(rows), length)
    token_BL, mask_BL, weight_BL = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for b, row in enumerate(rows):
        p, n = len(row.prompt), len(row.prompt) + len(row.reply)
        token_BL[b, :n] = np.concatenate([row.prompt, row.reply])
        mask_BL[b, :n] = True
        weight_BL[b, 1:p] = PROMPT_WEIGHT / (p - 1) / len(rows)
        weight_BL[b, p:n] = 1 / len(row.reply) / len(rows)
    return token_BL, mask_BL, weight_BL


def batches(rows: Sequence[Row], seed: int, updates: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`updates` batches of ROWS rows; rows of similar length share a batch so that little is padding."""
    rows = [row for row in rows if len(row.prompt) + len(row.reply) <= LENGTHS[-1]]
    if len(rows) < ROWS:
        raise ValueError(f'{len(rows)} demonstrated rows do not fill one batch of {ROWS}; use more games')
    rng, made = np.random.default_rng(seed), 0
    while True:
        order = rng.permutation(len(rows))
        for start in range(0, len(order) - ROWS + 1, 32 * ROWS):
            window = sorted(order[start:start + 32 * ROWS], key=lambda i: len(rows[i].prompt) + len(rows[i].reply))
            for chunk in rng.permutation(len(window) // ROWS):
                chosen = [rows[i] for i in window[chunk * ROWS:(chunk + 1) * ROWS]]
                longest = max(len(row.prompt) + len(row.reply) for row in chosen)
                yield collate(chosen, next(n for n in LENGTHS if n >= longest))
                made += 1
                if made == updates:
                    return


def clone_loss(params, config: model.QwenConfig, token_BL, mask_BL, weight_BL):
    """Weighted negative log-likelihood, and that of the replies alone per token."""
    hidden_BLD, _ = model.Qwen(config).apply({'params': params}, token_BL, *model.positions_and_mask(mask_BL))
    logits_BLV = model.project(params, hidden_BLD[:, :-1], config)
    nll_BL = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, token_BL[:, 1:])
    return jnp.sum(nll_BL * weight_BL[:, 1:])


def make_optimizer(updates: int, rate: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(100, updates // 10), updates, 0.1 * rate)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    out, seed = pathlib.Path(_OUT.value), _SEED.value
    games = [alfworld_games.generate_game(seed + 10_000, 'train', i, alfworld_games.DIFFICULTIES[_difficulty(i)])
             for i in tqdm.trange(_GAMES.value, desc='games')]
    played = [Game(g.problem, g.task) for g in games]
    if _START.value:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_START.value, out / 'tokenizer', ignore=shutil.ignore_patterns('*.safetensors', 'c*', 'g*', 'R*'))
    else:
        texts = [text for i, game in enumerate(played[:300]) for text in demonstrate(game, f'{seed}/{i}', None)]
        write_tokenizer(out / 'tokenizer', texts, object_names())
    builder = prompts.ChatPrompts(pretrained.load_tokenizer(out / 'tokenizer'), wording='compact', history=2,
                                  max_prompt=LENGTHS[-1])
    rows = [row for i, game in enumerate(tqdm.tqdm(played, desc='demonstrations')) for k in range(EPISODES)
            for row in demonstrate(game, f'{seed}/{i}/{k}', builder)]
    lengths = [len(row.prompt) + len(row.reply) for row in rows]
    print(f'{len(rows)} rows of {np.mean(lengths):.0f} tokens (longest {max(lengths)})')
    folder = train(out, rows, seed, _UPDATES.value)
    write_card(folder, len(rows), seed)
    print(f'results: {folder}')


def _commands(folder: pathlib.Path, seed: int) -> str:
    """The commands that made this folder, the earlier run first."""
    this = (f'`python -m experiments.make_tiny --seed={seed} --games={_GAMES.value} '
            f'--updates={int(folder.name.removeprefix("update_"))} --learning_rate={_RATE.value:g}`')
    if not _START.value:
        return this
    before = re.search(r'Made by (`.*?`)[,:]', (pathlib.Path(_START.value) / 'README.md').read_text())
    return f'{before.group(1) if before else _START.value}, then from there {this} with `--start_from`'


def object_names() -> list[str]:
    """Every receptacle and object of ALFWorld, as the texts spell it."""
    kinds = {*alfworld_rooms.FITS, *alfworld_rooms.EXTRAS}.union(*alfworld_rooms.ATTRIBUTES.values())
    return sorted(kind.lower() for kind in kinds)


def _difficulty(index: int) -> str:
    """Mostly the default's small rooms, and some larger ones so that real games are not entirely foreign."""
    return 'medium' if index % 20 == 19 else 'small' if index % 20 >= 16 else 'tiny'


def train(out: pathlib.Path, rows: Sequence[Row], seed: int, updates: int) -> pathlib.Path:
    """Clone, and write OUT/update_N (a whole Hugging Face folder) every SAVE_EVERY updates; returns the last one."""
    vocabulary = len(pretrained.load_tokenizer(out / 'tokenizer'))
    config = model.QwenConfig(vocab_size=-(-vocabulary // 16) * 16, rope_theta=1e4, max_positions=4096, **SIZES)
    # The usual 0.02 suits wide models; at width 128 it is a slow start.
    params = jax.tree.map(lambda x: x * 3.0 if x.ndim > 1 else x, model.init_params(config, jax.random.key(seed)))
    if _START.value:
        config, params = pretrained.load_folder(_START.value)
    optimizer = make_optimizer(updates, _RATE.value)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, *batch):
        def add(total, micro):  # a few rows at a time stay in the CPU's cache: half as fast again as all at once
            return jax.tree.map(jnp.add, total, jax.value_and_grad(clone_loss)(params, config, *micro)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        micros = jax.tree.map(lambda x: x.reshape(-1, MICRO_ROWS, x.shape[1]), batch)
        (loss, grads), _ = jax.lax.scan(add, zero, micros)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, loss

    progress = tqdm.tqdm(batches(rows, seed, updates), total=updates, desc='cloning', mininterval=5)
    losses = []
    for update, batch in enumerate(progress, start=1):
        params, opt_state, loss = step(params, opt_state, *batch)
        losses.append(float(loss))
        progress.set_postfix(loss=f'{np.mean(losses[-50:]):.3f}', refresh=False)
        if update % SAVE_EVERY == 0 or update == updates:
            folder = out / f'update_{update:05d}'
            pretrained.save_folder(folder, config, params, tokenizer_from=out / 'tokenizer')
            print(f'\n{folder}: loss {np.mean(losses[-50:]):.3f}', flush=True)
    return folder


def write_card(folder: pathlib.Path, num_rows: int, seed: int) -> None:
    """README.md: how the policy was made and what it scores on the default's validation games."""
    config = base.get_config('tiny')
    policy = wiring.load_policy(config, folder)
    with evaluate.Evaluator(config, policy, wiring.make_prompts(config, policy.tokenizer)) as evaluator:
        results = evaluator.results(policy.params, seed=0)
    parameters = sum(x.size for x in jax.tree.leaves(policy.params))
    (folder / 'README.md').write_text(CARD.format(
        parameters=parameters / 1e6, rows=num_rows, made=_commands(folder, seed), games=_GAMES.value, episodes=EPISODES, noise=NOISE, max_steps=config.env.max_steps,
        temperature=config.eval.temperature, sizes='{num_layers} layers, width {embed_dim}, {num_heads} heads'.format(**SIZES), table=evaluate.table(results)))


if __name__ == '__main__':
    app.run(main)
