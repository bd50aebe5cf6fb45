#!/usr/bin/env bash
# Makes every table and picture of README and docs from the records in docs/results and the model in
# docs/models.
set -euo pipefail
cd "$(dirname "$0")/.."

python plots/results.py

# Records whose names do not tell them apart, by their time.
dqn=docs/results/breakout/scorer_dqn__Breakout-MinAtar__
rate=docs/results/follower_rate/scorer_dqn__Breakout-MinAtar__scorer-follower
scorer=("${dqn}"scorer__s0__*-025247-* "${dqn}"scorer__s30__*)
baseline=("${dqn}"baseline__s0__*-003831)
baseline_at_5e4=("${dqn}"baseline__s0__*-005345-*)
baseline_batch_128=("${dqn}"baseline__s0__*-005058-145298)
per_layer_lr=("${dqn}"baseline-per-layer-lr__*)
ablations=("${dqn}"scorer-inverted-roles__* "${dqn}"scorer-synchronous__* "${dqn}"msbe-scorer__*)

# figure TOOL PICTURE RUNS...
figure() {
  python "plots/$1.py" --out "docs/images/$2.png" "${@:3}"
}

figure learning_curves breakout \
  "${baseline[@]}" "${baseline_at_5e4[@]}" "${scorer[@]}" "${rate}"0.001__*
figure ablations ablations \
  "${baseline[@]}" "${baseline_at_5e4[@]}" "${baseline_batch_128[@]}" "${per_layer_lr[@]}" \
  "${scorer[@]}" "${ablations[@]}"
figure learning_curves control docs/results/control
figure learning_curves minigrid docs/results/minigrid
figure learning_curves atari docs/results/atari/*{BattleZone,NameThisGame,Phoenix,Pong,Qbert}*
figure deep_sea deep_sea docs/results/deep_sea > /dev/null
figure deep_sea deep_sea_long docs/results/deep_sea_long > /dev/null
figure baird baird docs/results/baird/baird__Baird__sampled-balanced__*
python plots/game_or_rates.py --out docs/images/game_or_rates.png
python plots/game_or_rates.py --show steps --out docs/images/rank_and_norm.png
python plots/game_or_rates.py --show rates --out docs/images/rates.png
python plots/speed.py --saved docs/results/speed/h200/{dqn,grow}.json --grow \
  --figure docs/images/growth.png > /dev/null
python plots/watch.py docs/models/*Breakout* --out docs/images/breakout.gif
