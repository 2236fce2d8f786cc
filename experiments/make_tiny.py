"""Make the tiny policies of the embedded defaults: Hugging Face Qwen2 folders, cloned from scripted players.

    python -m experiments.make_tiny --out=FOLDER            (about an hour on two cores; a folder every 1,000 updates)
    python -m experiments.make_tiny --environment=sokoban --tasks=8000 --updates=1200 --learning_rate=1e-3 --out=FOLDER
    python -m experiments.make_tiny --environment=webshop --tasks=4000 --updates=3000 --learning_rate=2e-3 --out=FOLDER

Deliberately half-trained: it should know the format, copy names, and win some easy games, so that RL has something to
start from and something left to do. The model card in the folder says how it was made and what it scores.

    python -m experiments.make_tiny --unskilled --start_from=covsero_jax/assets/tiny --tasks=300 --updates=400 \
        --learning_rate=1e-3 --out=runs/unskilled          (minutes; a start that never cleans, heats or cools)
"""

from __future__ import annotations

import json
import pathlib
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
from covsero_jax import model, pretrained
from experiments import demonstrations, evaluate, wiring

_OUT = flags.DEFINE_string('out', None, 'folder to write', required=True)
_UPDATES = flags.DEFINE_integer('updates', 8000, 'optimizer steps of behaviour cloning')
_ENVIRONMENT = flags.DEFINE_enum('environment', 'alfworld', base.ENVIRONMENTS, 'whose texts and demonstrations')
_TASKS = flags.DEFINE_integer('tasks', 3000, 'generated games, goals or levels to demonstrate on')
_START = flags.DEFINE_string('start_from', '', 'a folder of an earlier run to go on from, with its tokenizer')
_RATE = flags.DEFINE_float('learning_rate', 3e-3, 'peak of the cosine schedule')
_UNSKILLED = flags.DEFINE_bool('unskilled', False, 'the demonstrator takes no notice of "clean", "hot" and "cool": half of '
                               'the task types then fail in every rollout, for want of one command')
_SEED = flags.DEFINE_integer('seed', 0, 'seed of games, demonstrations and initial weights')

SIZES = {'embed_dim': 128, 'mlp_dim': 256, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 32}
LAYERS = {'alfworld': 2, 'webshop': 2, 'sokoban': 3}  # looking ahead in a grid takes more than copying names
ROWS = 32  # per optimizer step
MICRO_ROWS = 8  # of them at one time
# Language-model loss on the prompt: repeated names teach copying; hits of a search and grids are not to be predicted.
PROMPT_WEIGHTS = {'alfworld': 0.5, 'webshop': 0.1, 'sokoban': 0.02}
# Times the usual 0.02. Larger is a faster start at width 128, but copying from a long page is learnt from small weights.
INITS = {'alfworld': 3.0, 'webshop': 1.0, 'sokoban': 3.0}
# Updates on random tokens that repeat, before any text. From a page of 300 tokens, copying does not emerge in thousands of
# updates; from these it does in 500, and the rest is learnt at once.
DRILLS = {'alfworld': 0, 'webshop': 1000, 'sokoban': 0}
DRILL_LENGTH = 64
SAVE_EVERY = 1000
LENGTHS = (64, 96, 128, 160, 192, 224, 256, 320, 448)  # row lengths that are compiled


# The pre-tokenizer of Qwen2 (the pattern in its published tokenizer.json).
QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


CARD = """# A tiny Qwen2 policy for {environment}'s texts

The start of covsero_jax's embedded default: {parameters:.2f} M parameters, {sizes}.
It is half-trained on purpose: it knows
the reply format, copies names, and solves some easy tasks, so that reinforcement learning has a start and a way to go.

Made by {made}: behaviour cloning of {player} on {tasks}
{episodes} episodes each, {noise:.0%} random commands that are not imitated, {rows} rows. No outside data and no pretrained
weights were used. Tokenizer: Qwen2's byte-level BPE, trained on the same texts. Prompt: the `compact` wording of
`covsero_jax/wordings.py`. Licence: as the project's.

Success within {max_steps} steps at temperature {temperature} on the default's evaluation tasks, each played once:

```
{table}
```
"""
PLAYERS = {
    'alfworld': ('the scripted explorer (which sees only texts, never the hidden state)', 'generated games,'),
    'webshop': ('the rule-based oracle', 'goals of other generated catalogues,'),
    'sokoban': ('the move-optimal solver', 'other generated levels,'),
}


def write_tokenizer(folder: pathlib.Path, texts: Sequence[str], names: Sequence[str], whole_words: Sequence[str]) -> None:
    """Qwen2's own byte-level BPE, trained on this environment's text, with every one of `names` a token of its own.

    Normaliser and pre-tokenizer are exactly Qwen2's, which transformers imposes on this model type whatever the folder
    says. They would cut ' 12' into ' ', '1', '2'; so `whole_words`, numbers of ALFWorld's objects and article numbers of
    the generated shop, are added tokens: a small model copies one token, and garbles ten.
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
    bpe.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in whole_words])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'Qwen2Tokenizer', 'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>',
        'clean_up_tokenization_spaces': False, 'model_max_length': 32768, 'chat_template': CHAT_TEMPLATE}, indent=1))


def collate(rows: Sequence[demonstrations.Row], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-padded tokens, real-token mask, and the loss weight of predicting each token, all [B, L]."""
    shape = (len(rows), length)
    token_BL, mask_BL, weight_BL = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for b, row in enumerate(rows):
        p, n = len(row.prompt), len(row.prompt) + len(row.reply)
        token_BL[b, :n] = np.concatenate([row.prompt, row.reply])
        mask_BL[b, :n] = True
        weight_BL[b, 1:p] = PROMPT_WEIGHTS[_ENVIRONMENT.value] / (p - 1) / len(rows)
        weight_BL[b, p:n] = 1 / len(row.reply) / len(rows)
    return token_BL, mask_BL, weight_BL


def batches(rows: Sequence[demonstrations.Row], seed: int, updates: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
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


def drills(vocabulary: int, seed: int, updates: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`updates` batches of ROWS rows of repeated random words; only what a reader can know carries weight.

    A row says two to five segments of three to twelve random tokens again and again, in random order: after the first token
    of a segment that was there before, the next one can be copied. No distance repeats, so counting back does not help.
    """
    rng = np.random.default_rng(seed)
    for _ in range(updates):
        token_BL, weight_BL = np.zeros((ROWS, DRILL_LENGTH), np.int32), np.zeros((ROWS, DRILL_LENGTH), np.float32)
        for b in range(ROWS):
            segments = [rng.choice(vocabulary, rng.integers(3, 13), replace=False) for _ in range(rng.integers(2, 6))]
            seen, tokens, weights = set(), [], []
            while len(tokens) < DRILL_LENGTH:
                said = int(rng.integers(len(segments)))
                tokens += segments[said].tolist()
                weights += [0.0, *[float(said in seen)] * (len(segments[said]) - 1)]
                seen.add(said)
            token_BL[b], weight_BL[b] = tokens[:DRILL_LENGTH], weights[:DRILL_LENGTH]
        yield token_BL, np.ones((ROWS, DRILL_LENGTH), bool), weight_BL / weight_BL.sum()


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
    demonstrated = demonstrations.make(_ENVIRONMENT.value, _TASKS.value, seed, _UNSKILLED.value)
    if _START.value:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_START.value, out / 'tokenizer', ignore=shutil.ignore_patterns('*.safetensors', 'c*', 'g*', 'R*'))
    else:
        write_tokenizer(out / 'tokenizer', demonstrated.texts(), demonstrated.names, demonstrated.whole_words)
    tokenizer, config = pretrained.load_tokenizer(out / 'tokenizer'), base.get_config('tiny', _ENVIRONMENT.value)
    rows = demonstrated.rows(wiring.make_prompts(config, tokenizer))
    lengths = [len(row.prompt) + len(row.reply) for row in rows]
    print(f'{len(rows)} rows of {np.mean(lengths):.0f} tokens (longest {max(lengths)})')
    folder = train(out, rows, seed, _UPDATES.value)
    write_card(folder, len(rows), seed)
    print(f'results: {folder}')


def _commands(folder: pathlib.Path, seed: int) -> str:
    """The commands that made this folder, the earlier run first."""
    this = (f'`python -m experiments.make_tiny --environment={_ENVIRONMENT.value} --seed={seed} --tasks={_TASKS.value} '
            f'--updates={int(folder.name.removeprefix("update_"))} --learning_rate={_RATE.value:g}`')
    if not _START.value:
        return this
    before = re.search(r'Made by (`.*?`)[,:]', (pathlib.Path(_START.value) / 'README.md').read_text())
    return f'{before.group(1) if before else _START.value}, then from there {this} with `--start_from`'


def train(out: pathlib.Path, rows: Sequence[demonstrations.Row], seed: int, updates: int) -> pathlib.Path:
    """Clone, and write OUT/update_N (a whole Hugging Face folder) every SAVE_EVERY updates; returns the last one."""
    vocabulary = len(pretrained.load_tokenizer(out / 'tokenizer'))
    config = model.QwenConfig(vocab_size=-(-vocabulary // 16) * 16, rope_theta=1e4, max_positions=4096,
                              num_layers=LAYERS[_ENVIRONMENT.value], **SIZES)
    larger = INITS[_ENVIRONMENT.value]
    params = jax.tree.map(lambda x: x * larger if x.ndim > 1 else x, model.init_params(config, jax.random.key(seed)))
    num_drills = DRILLS[_ENVIRONMENT.value]
    if _START.value:
        (config, params), num_drills = pretrained.load_folder(_START.value), 0
    optimizer = make_optimizer(updates, _RATE.value)

    @jax.jit
    def step(params, opt_state, *batch):
        def add(total, micro):  # a few rows at a time stay in the CPU's cache: half as fast again as all at once
            return jax.tree.map(jnp.add, total, jax.value_and_grad(clone_loss)(params, config, *micro)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        micros = jax.tree.map(lambda x: x.reshape(-1, MICRO_ROWS, x.shape[1]), batch)
        (loss, grads), _ = jax.lax.scan(add, zero, micros)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, loss

    def learn(what: str, params, stream, total: int):
        opt_state, losses = optimizer.init(params), []
        progress = tqdm.tqdm(stream, total=total, desc=what, mininterval=5)
        for update, batch in enumerate(progress, start=1):
            params, opt_state, loss = step(params, opt_state, *batch)
            losses.append(float(loss))
            progress.set_postfix(loss=f'{np.mean(losses[-50:]):.3f}', refresh=False)
            yield update, params, np.mean(losses[-50:])

    for _, params, _ in learn('drilling', params, drills(vocabulary, seed, num_drills), num_drills):
        pass
    for update, params, loss in learn('cloning', params, batches(rows, seed, updates), updates):
        if update % SAVE_EVERY == 0 or update == updates:
            folder = out / f'update_{update:05d}'
            pretrained.save_folder(folder, config, params, tokenizer_from=out / 'tokenizer')
            print(f'\n{folder}: loss {loss:.3f}', flush=True)
    return folder


def write_card(folder: pathlib.Path, num_rows: int, seed: int) -> None:
    """README.md: how the policy was made and what it scores on the default's validation games."""
    environment = _ENVIRONMENT.value
    config, (player, tasks) = base.get_config('tiny', environment), PLAYERS[environment]
    policy = wiring.load_policy(config, folder)
    with evaluate.Evaluator(config, policy, wiring.make_prompts(config, policy.tokenizer)) as evaluator:
        results = evaluator.results(policy.params, seed=0)
    parameters = sum(x.size for x in jax.tree.leaves(policy.params))
    (folder / 'README.md').write_text(CARD.format(
        environment={'alfworld': 'ALFWorld', 'webshop': 'WebShop', 'sokoban': 'Sokoban'}[environment],
        parameters=parameters / 1e6, rows=num_rows, made=_commands(folder, seed), player=player,
        tasks=f'{_TASKS.value} {tasks}', episodes=demonstrations.EPISODES, noise=demonstrations.NOISE[environment],
        max_steps=config.env.max_steps, temperature=config.eval.temperature,
        sizes='{num_layers} layers, width {embed_dim}, {num_heads} heads'.format(num_layers=LAYERS[environment], **SIZES),
        table=evaluate.table(results)))


if __name__ == '__main__':
    app.run(main)
