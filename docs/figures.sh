#!/usr/bin/env bash
# Makes every picture of docs/images, but for breakout.gif (a trained model is not kept), from the records.
set -euo pipefail
cd "$(dirname "$0")/.."
dqn=docs/results/breakout/scorer_dqn__Breakout-MinAtar__
rate=docs/results/follower_rate/scorer_dqn__Breakout-MinAtar__scorer-follower
scorer="${dqn}scorer__s0__*-025247* ${dqn}scorer__s30__*"
baseline="${dqn}baseline__s0__*-003831"
rates="${dqn}baseline__s0__*-025229* ${dqn}baseline__s0__*-025436* ${dqn}baseline__s0__*-005345* ${dqn}baseline__s0__*-025449* ${dqn}baseline__s0__*-005401*"
controls="${dqn}baseline__s0__*-005345* ${dqn}baseline__s0__*-005058-145298 ${dqn}baseline-per-layer-lr__*"
ablations="${dqn}scorer-inverted-roles__* ${dqn}scorer-synchronous__* ${dqn}msbe-scorer__*"
figure() { python "plots/$1.py" --out "docs/images/$2.png" "${@:3}"; }
# shellcheck disable=SC2086
{
  figure learning_curves breakout $baseline ${dqn}baseline__s0__*-005345* $scorer ${rate}0.001__*
  figure ablations ablations $baseline $controls $scorer $ablations
  figure sensitivity rates $baseline $rates ${rate}*
  figure representation representation $baseline ${dqn}scorer__s0__*-025247*
  figure learning_curves control docs/results/control/*
  figure learning_curves minigrid docs/results/minigrid/* --smooth 10
  figure learning_curves atari docs/results/atari/*{Phoenix,Pong,Qbert}* --smooth 10
  figure deep_sea deep_sea docs/results/deep_sea/*
  figure baird baird docs/results/baird/baird__Baird__sampled-balanced__*
}
python plots/speed.py --saved docs/results/speed/h200/{dqn,grow}.json --grow --figure docs/images/growth.png
