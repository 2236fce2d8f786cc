"""SERO's offline experiments: oracle branches are collected once, then replayed, measured and drawn.

    python -m experiments.oracle_bank collect --workdir=runs/NAME --roots=256 --out=banks/late.jsonl
    python -m experiments.oracle_bank replay --workdir=runs/NAME --bank=banks/late.jsonl
    python -m experiments.oracle_bank proxy --workdir=runs/NAME --bank=banks/late.jsonl
    python -m experiments.oracle_bank show results/oracle/proxy.json results/tiny/hgpo+sero-seed0.json

The policy is a run's checkpoint (--workdir, --which), a Hugging Face folder (--model), or the configuration's model.
--config=configs/NAME.py:PRESET is the experiment, by default alfworld_hgpo; --config.field=value changes any field of
it, of games (--config.env.data=FOLDER) as well as of SERO.

collect  rolls out groups as training does, and keeps one oracle branch for each group with a failure. Tasks and draws
         depend on the seed alone, so that banks of an early and of a late policy begin with the same tasks. For A.4's
         control, collect from a run that was stopped early (--config.updates=4) and from one that was not.
         --check_restoration also restores every root the other way, and writes how far copy and replay agree, and from
         which share of the states that can still be won the oracle wins.
replay   the fixed-bank control (A.1, F.2). All weightings start from the same policy and replay the same bank, and each
         branch has the mass that SERO's own weights give it. It is training as ever: the base method goes on with
         fresh rollouts, as in the paper, and each update adds `num_groups` branches of the bank, in every variant the
         same ones; no oracle is asked. A checkpoint is first exported as a Hugging Face folder; the optimizer's moments
         and the KL reference start anew from it, in all variants alike. The runs are made and compared by
         `experiments.compare`, which also resumes them; its options --seeds, --jobs and --name are taken over.
proxy    does compatibility predict what the policy does (A.3)? See `oracle_checks`.
show     weight by depth, early and late (Figure 4), and the proxy check, as pictures. See `oracle_plots`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tqdm
from absl import logging
from ml_collections import ConfigDict

from covsero_jax import bank, learner, oracle, pretrained, workers
from covsero_jax.trajectory import OracleBranch, Policy
from experiments import compare, evaluate, oracle_checks, oracle_plots, sero, train, wiring

WEIGHTINGS = ('sero', 'full_flat', 'depth_decay', 'shuffled')
BARREN_BATCHES = 20  # so many batches without a failure in a row: there is nothing to collect


def build(options: argparse.Namespace, overrides: Sequence[str]) -> ConfigDict:
    """The checked configuration, in which the environments have an oracle whatever the base experiment says."""
    return compare.build([
        f'--config={options.config}', '--config.sero.variant=sero', *overrides, '--config.sero.bank='])


def load(options: argparse.Namespace, config: ConfigDict) -> tuple[wiring.Policy, str]:
    """The policy that the options name, and where it is from, in words."""
    wiring.use_compilation_cache(config.debug.compilation_cache)
    policy = wiring.load_policy(config, pathlib.Path(options.model) if options.model else None)
    if options.workdir:
        params, update = evaluate.checkpoint_params(config, policy, pathlib.Path(options.workdir), options.which)
        return policy._replace(params=params), f'{options.workdir}, update {update}'
    return policy, options.model or config.model.path or 'the packaged tiny policy'


def make_act(config: ConfigDict, policy: wiring.Policy) -> Policy:
    """The policy at the training temperature."""
    return wiring.make_act(config, policy, policy.params, key=wiring.draw_key(config.seed, 0, 'sample'),
                           temperature=config.rollout.temperature)


def read(config: ConfigDict, policy: wiring.Policy, path: str) -> tuple[list[OracleBranch], dict[str, object]]:
    """A bank that belongs to this configuration and policy, and what it says about itself. Raises bank.BankError."""
    with wiring.make_pool(config, config.env.train_split, 1) as pool:  # it knows the games' names
        return bank.read_bank(pathlib.Path(path), wiring.bank_identity(config, policy, pool.task_names))


# ---- collect ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Collection:
    """What `collect_bank` has so far. others: the same roots restored the other way, if that is checked."""

    branches: list[OracleBranch] = dataclasses.field(default_factory=list)
    others: list[OracleBranch] = dataclasses.field(default_factory=list)
    rollout_steps: int = 0


def collect_bank(
    config: ConfigDict, policy: wiring.Policy, prompts, pool: workers.WorkerPool, num_roots: int, *, both_ways: bool
) -> Collection:
    """Batches of groups, and branches from their failures, until `num_roots` roots have been tried."""
    out, recent, barren = Collection(), [], 0
    first, second = sorted(oracle.RESTORATION, key=lambda way: way != config.sero.restoration)
    play = config.copy_and_resolve_references()
    if both_ways:
        play.sero.restoration = 'copy'  # snapshots are kept
    never = types.SimpleNamespace(check=lambda *_: None)  # stops
    continued = functools.partial(oracle.collect_branches, pool, prompts, think=config.sero.think,
                                  max_target=config.prompt.max_action)
    with tqdm.tqdm(total=num_roots, desc='roots', dynamic_ncols=True) as bar:
        for number in itertools.count():
            groups, _ = train.collect(play, pool, policy, prompts, policy.params, number, never)
            roots = oracle.sample_roots(
                groups, np.random.default_rng([config.seed, number, wiring.PURPOSES['roots']]),
                max_steps=config.env.max_steps, sampling=config.sero.root_sampling, task_types=pool.task_types,
                recent=recent, needed=wiring.needed_steps(config, pool))[: num_roots - len(out.branches)]
            out.rollout_steps += sum(len(t.steps) for group in groups for t in group.trajectories)
            out.branches += continued(roots=roots, restoration=first)
            if both_ways:
                out.others += continued(roots=roots, restoration=second)
            bar.update(len(roots))
            bar.set_postfix(valid=sum(not branch.invalid for branch in out.branches))
            if len(out.branches) == num_roots:
                return out
            recent = [*recent, *(pool.task_types[root.task_id] for root in roots)][-sero.RECENT_ROOTS:]
            barren = 0 if roots else barren + 1
            if barren == BARREN_BATCHES:
                raise wiring.ConfigError(f'no rollout of the last {barren} batches failed: this policy leaves nothing '
                                         'to collect here; take an earlier one, or harder games')


def with_more_time(config: ConfigDict, prompts, branches: Sequence[OracleBranch]) -> list[OracleBranch]:
    """Each branch again, by replay, in environments that allow twice as many steps: was it only the budget?"""
    patient = config.copy_and_resolve_references()
    patient.env.max_steps = 2 * config.env.max_steps
    roots = [dataclasses.replace(b.root, steps_left=b.root.steps_left + config.env.max_steps) for b in branches]
    with wiring.make_pool(patient, config.env.train_split, min(len(roots), 32), oracle=config.sero.oracle) as pool:
        return oracle.collect_branches(pool, prompts, roots, restoration='replay', think=config.sero.think,
                                       max_target=config.prompt.max_action)


def collect(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = build(options, overrides)
    policy, source = load(options, config)
    prompts = wiring.make_prompts(config, policy.tokenizer)
    num_envs = config.rollout.num_groups * config.rollout.group_size
    with wiring.make_pool(config, config.env.train_split, num_envs, oracle=config.sero.oracle) as pool:
        both_ways = bool(options.check_restoration)
        collected = collect_bank(config, policy, prompts, pool, options.roots, both_ways=both_ways)
        identity = wiring.bank_identity(config, policy, pool.task_names)
    counts = oracle.branch_metrics(collected.branches)
    made = oracle_checks.origin(config, source) | {'counts': counts, 'rollout_steps': collected.rollout_steps}
    bank.write_bank(options.out, collected.branches, identity | made)
    reasons = [f'{n} {reason}' for reason, n in oracle_checks.reasons(collected.branches).items()]
    print(f'results: {options.out}: {options.roots} roots of {source}, {counts["oracle/valid"]:.0f} valid, invalid '
          f'{", ".join(reasons) or "none"}; {counts["oracle/steps"]:.0f} oracle steps, '
          f'{collected.rollout_steps} rollout steps')
    if both_ways:
        by_way = {config.sero.restoration: collected.branches}
        by_way[next(way for way in oracle.RESTORATION if way not in by_way)] = collected.others
        late = [b for b in collected.branches if b.invalid == 'budget']
        again = with_more_time(config, prompts, late) if late else []
        report = oracle_checks.restoration(by_way['copy'], by_way['replay'], late, again)
        oracle_checks.write(options.check_restoration, made | {'kind': 'restoration', **report})
        print(oracle_checks.restoration_table(report))
        print(f'results: {options.check_restoration}')


# ---- replay and proxy ------------------------------------------------------------------------------------------------


def replay(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = build(options, overrides)
    policy, source = load(options, config)
    branches, _ = read(config, policy, options.bank)
    folder = policy.folder
    if options.workdir:
        folder = pathlib.Path(options.runs) / options.name / source.replace(', update ', '-').replace('/', '-')
        if not folder.exists():
            pretrained.save_folder(folder, policy.config, policy.params, tokenizer_from=policy.folder)
    print(f'{len(branches)} branches of {options.bank}; every variant starts from {source}')
    compare.main([
        f'--config={options.config}', f'--variants={options.variants}', f'--seeds={options.seeds}',
        f'--jobs={options.jobs}', f'--name={options.name}', f'--reference={options.reference}',
        f'--runs={options.runs}', *overrides,
        f'--config.model.path={folder if options.workdir or options.model else config.model.path}',
        f'--config.sero.bank={options.bank}', '--config.sero.match_mass=True'])


def weigh(config: ConfigDict, policy: wiring.Policy, branches: Sequence[OracleBranch]) -> sero.Weighed:
    """Compatibilities and weights of branches under the policy, computed as in training."""
    logprobs = learner.make_logprob_step(policy.config, wiring.loss_config(config), policy.mesh)
    with sero.Sero(config, policy, None, None, logprobs, policy.mesh) as scorer:
        return scorer.weigh(policy.params, branches, wiring.draw_key(config.seed, 0, 'shuffle'))


def proxy(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = build(options, overrides)
    policy, source = load(options, config)
    branches, about = read(config, policy, options.bank)
    branches = [branch for branch in branches if not branch.invalid]
    if not branches:
        raise bank.BankError(f'{options.bank}: no branch in this bank is valid, so there is nothing to check')
    weighed = weigh(config, policy, branches)
    prompts = wiring.make_prompts(config, policy.tokenizer)
    matches = oracle_checks.sample_matches(make_act(config, policy), prompts, branches, options.samples)
    report = oracle_checks.proxy(matches, weighed, seed=config.seed)
    oracle_checks.write(options.out, oracle_checks.origin(config, source) | {
        'kind': 'proxy', 'bank': {name: about[name] for name in ('policy', 'seed', 'oracle', 'counts', 'games')},
        'samples': options.samples, **report})
    print(oracle_checks.proxy_table(report))
    print(f'results: {options.out}')


def show(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    if overrides:
        raise wiring.ConfigError(f'show takes files only, not {" ".join(overrides)}')
    print(f'results: {", ".join(map(str, oracle_plots.draw(options.files, options.out)))}')


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the configuration flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar='collect | replay | proxy | show')

    def add(run, what: str, **defaults: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__, help=what, allow_abbrev=False)
        command.set_defaults(run=run, **defaults)
        if run is not show:
            command.add_argument('--config', default='configs/alfworld_hgpo.py', help='experiment[:preset]')
            source = command.add_mutually_exclusive_group()
            source.add_argument('--workdir', help='a run whose checkpoint is the policy')
            source.add_argument('--model', help="a Hugging Face folder; default the configuration's")
            command.add_argument('--which', choices=('latest', 'best'), default='latest', help='checkpoint of the run')
        return command

    command = add(collect, 'write a bank')
    command.add_argument('--roots', type=_positive, default=256, help='roots to try, invalid ones included')
    command.add_argument('--out', type=pathlib.Path, required=True, help='the bank to write')
    command.add_argument('--check_restoration', type=pathlib.Path, nargs='?', const='results/oracle/restoration.json',
                         metavar='FILE.json', help='also compare copy and replay (default %(const)s)')
    command = add(replay, 'train with every weighting of one bank')
    command.add_argument('--bank', required=True)
    command.add_argument('--variants', default=','.join(f'hgpo+{weighting}' for weighting in WEIGHTINGS),
                         help='as in experiments.compare; default %(default)s')
    command.add_argument('--seeds', type=_positive, default=3)
    command.add_argument('--jobs', type=_positive, default=1)
    command.add_argument('--name', default='fixed_bank', help='folder under results/')
    command.add_argument('--reference', default='', help='a variant that all are compared with')
    command.add_argument('--runs', default='runs/compare', help='where the runs are written')
    command = add(proxy, 'is compatibility what the policy does?')
    command.add_argument('--bank', required=True)
    command.add_argument('--samples', type=_positive, default=32, help='replies at every step')
    command.add_argument('--out', type=pathlib.Path, default=pathlib.Path('results/oracle/proxy.json'))
    command = add(show, 'pictures')
    command.add_argument('files', nargs='+', type=pathlib.Path, help='of proxy, and results of runs with SERO')
    command.add_argument('--out', type=pathlib.Path, default=pathlib.Path('results/oracle'), help='folder to write to')
    options, rest = parser.parse_known_args(argv)
    stray = [argument for argument in rest if not argument.startswith('--config.')]
    if stray:
        parser.error(f'unexpected arguments {stray}')
    return options, rest


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive number')
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    logging.set_verbosity(logging.WARNING)
    options, overrides = parse(argv)
    options.run(options, overrides)


if __name__ == '__main__':
    wiring.limit_preallocation()
    with wiring.one_line_errors():
        main()
