"""The paper's printed numbers and thresholds (tables "Final IQM return", "minigrid", "Sample Efficiency Results")."""

ENVS = ("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar")

# What the runs behind FINAL had, so that only like is compared; None: an argument that the baseline lacks. The paper
# takes time-outs of DQN for terminations. Runs that bootstrap through them are shown too, and say so.
GAME = {
    "leader_decay_power": (1.0, None),
    "follower_loss": ("variance", None),
    "follower_learning_rate": (5e-4, None),
}
SETTINGS = {
    "DQN": GAME | {"learning_rate": (1e-4,), "batch_size": (64,), "ablation": (None,)},
    "PQN": GAME | {"learning_rate": (2.5e-4,), "td_lambda": (0.65,), "num_epochs": (2,)},
}

# (algorithm, variant, row's place among those of that name): final IQM return and the number after +-, in ENVS' order.
# The paper prints two pairs of rows that are both called DQN.
FINAL = {
    ("DQN", "Baseline", 1): ((54.95, 0.92), (19.16, 1.50), (62.70, 0.17), (127.78, 0.55)),
    ("DQN", "SCORER", 1): ((54.78, 0.42), (65.69, 2.52), (63.03, 0.08), (148.71, 2.02)),
    ("DQN", "Baseline", 2): ((52.55, 2.27), (19.21, 3.81), (62.23, 0.13), (118.41, 2.08)),
    ("DQN", "SCORER", 2): ((52.88, 0.41), (63.93, 1.86), (62.75, 0.09), (147.82, 4.44)),
    ("DDQN", "Baseline", 1): ((50.77, 1.19), (36.47, 5.04), (62.22, 0.07), (116.72, 3.36)),
    ("DDQN", "SCORER", 1): ((52.59, 0.27), (64.44, 2.48), (62.68, 0.08), (146.67, 5.14)),
    ("Dueling DQN", "Baseline", 1): ((39.22, 9.24), (27.81, 3.99), (61.89, 0.09), (121.21, 1.70)),
    ("Dueling DQN", "SCORER", 1): ((52.28, 0.55), (60.04, 2.62), (62.27, 0.09), (139.08, 3.42)),
    ("Dueling DDQN", "Baseline", 1): ((46.53, 3.05), (27.68, 5.55), (61.58, 0.14), (122.26, 1.44)),
    ("Dueling DDQN", "SCORER", 1): ((52.44, 0.24), (59.92, 3.83), (62.22, 0.08), (142.71, 2.82)),
    ("PQN", "Baseline", 1): ((50.41, 1.34), (69.97, 0.68), (61.77, 0.34), (137.73, 1.04)),
    ("PQN", "SCORER", 1): ((50.80, 0.62), (71.16, 0.84), (61.05, 0.47), (141.85, 0.76)),
}

# Pairs of FINAL of which the table marks the lower as not significantly worse (bootstrap difference test): level. In
# all others it marks SCORER alone.
LEVEL = {("DQN", "Asterix-MinAtar"), ("PQN", "Asterix-MinAtar"), ("PQN", "Freeway-MinAtar")}

# Returns whose time of first reach the sample-efficiency tables print.
THRESHOLDS = {
    "Asterix-MinAtar": (35, 40),
    "Breakout-MinAtar": (17, 20, 25),
    "Freeway-MinAtar": (30, 40, 50),
    "SpaceInvaders-MinAtar": (75, 100, 110),
}

# Time to threshold on MiniGrid: millions of steps, the number after +-, and the success rate in per cent.
TIMES = {
    "Navix-DoorKey-6x6-v0": dict(SCORER=(0.3, 0.0, 100), Baseline=(0.4, 0.0, 100)),
    "Navix-SimpleCrossingS9N2-v0": dict(SCORER=(0.3, 0.0, 100), Baseline=(0.4, 0.0, 100)),
    "Navix-DistShift2-v0": dict(SCORER=(0.1, 0.0, 100), Baseline=(0.1, 0.0, 100)),
    "Navix-LavaGapS6-v0": dict(SCORER=(0.1, 0.0, 100), Baseline=(0.2, 0.0, 100)),
    "Navix-GoToDoor-8x8-v0": dict(SCORER=(0.2, 0.0, 100), Baseline=(0.3, 0.0, 100)),
    "Navix-Empty-Random-8x8-v0": dict(SCORER=(0.1, 0.0, 100), Baseline=(0.3, 0.1, 100)),
    "Navix-Dynamic-Obstacles-6x6-v0": dict(SCORER=(0.5, 0.0, 83), Baseline=(0.7, 0.1, 73)),
    "Navix-FourRooms-v0": dict(SCORER=(0.6, 0.0, 97), Baseline=(None, None, 0)),
}

# Sample efficiency: millions of steps to each of THRESHOLDS and the number after +-; None: N/A.
EFFICIENCY = {
    "Asterix-MinAtar": {
        ("DQN", "Baseline"): ((22.8, 0.6), (27.3, 1.1)),
        ("DQN", "SCORER"): ((14.6, 2.2), (17.3, 2.4)),
        ("DDQN", "Baseline"): ((23.3, 0.9), (27.7, 1.2)),
        ("DDQN", "SCORER"): ((14.8, 1.0), (18.2, 1.2)),
        ("Dueling DQN", "Baseline"): ((19.8, 1.0), (22.6, 1.0)),
        ("Dueling DQN", "SCORER"): ((15.4, 3.3), (18.3, 3.4)),
        ("Dueling DDQN", "Baseline"): ((20.5, 1.0), (25.1, 1.8)),
        ("Dueling DDQN", "SCORER"): ((17.2, 6.4), (16.6, 3.2)),
    },
    "Breakout-MinAtar": {
        ("DQN", "Baseline"): ((39.1, 7.6), None, None),
        ("DQN", "SCORER"): ((3.4, 0.2), (4.8, 0.5), (8.2, 0.9)),
        ("DDQN", "Baseline"): ((42.4, 6.6), (43.8, 5.0), (62.3, 6.4)),
        ("DDQN", "SCORER"): ((4.2, 0.4), (5.9, 0.8), (12.7, 3.6)),
        ("Dueling DQN", "Baseline"): ((43.6, 8.4), (50.8, 9.7), (72.0, 9.1)),
        ("Dueling DQN", "SCORER"): ((4.0, 0.4), (5.3, 0.6), (13.5, 2.7)),
        ("Dueling DDQN", "Baseline"): ((27.6, 6.5), (33.7, 5.8), (64.2, 5.2)),
        ("Dueling DDQN", "SCORER"): ((4.2, 0.4), (5.6, 0.6), (17.8, 7.9)),
    },
    "Freeway-MinAtar": {
        ("DQN", "Baseline"): ((3.8, 0.2), (6.0, 0.3), (10.1, 0.5)),
        ("DQN", "SCORER"): ((1.3, 0.1), (2.3, 0.1), (4.5, 0.1)),
        ("DDQN", "Baseline"): ((3.8, 0.3), (5.9, 0.3), (9.6, 0.4)),
        ("DDQN", "SCORER"): ((1.4, 0.1), (2.3, 0.1), (4.5, 0.2)),
        ("Dueling DQN", "Baseline"): ((4.7, 0.4), (6.1, 0.3), (10.0, 0.4)),
        ("Dueling DQN", "SCORER"): ((1.8, 0.2), (2.7, 0.2), (5.0, 0.4)),
        ("Dueling DDQN", "Baseline"): ((4.6, 0.5), (6.8, 0.7), (11.5, 1.1)),
        ("Dueling DDQN", "SCORER"): ((1.6, 0.2), (2.6, 0.2), (4.9, 0.4)),
    },
    "SpaceInvaders-MinAtar": {
        ("DQN", "Baseline"): ((9.7, 1.0), (20.6, 2.7), (31.2, 2.7)),
        ("DQN", "SCORER"): ((9.1, 0.5), (14.3, 0.8), (17.8, 1.7)),
        ("DDQN", "Baseline"): ((11.8, 1.1), (24.7, 2.7), (37.1, 2.6)),
        ("DDQN", "SCORER"): ((11.1, 0.6), (18.6, 2.5), (22.9, 3.4)),
        ("Dueling DQN", "Baseline"): ((10.0, 0.9), (23.4, 4.1), (33.2, 5.7)),
        ("Dueling DQN", "SCORER"): ((17.1, 0.7), (26.0, 1.8), (32.0, 2.5)),
        ("Dueling DDQN", "Baseline"): ((9.9, 0.7), (16.6, 1.4), (26.9, 3.1)),
        ("Dueling DDQN", "SCORER"): ((15.4, 0.7), (23.8, 1.8), (30.2, 3.4)),
    },
}

# Atari: mean scores of a random player and of a human (Wang et al., 2016), which normalise a score.
HUMAN = {
    "Alien-v5": (227.8, 7127.7),
    "Amidar-v5": (5.8, 1719.5),
    "Assault-v5": (222.4, 742),
    "Asterix-v5": (210, 8503.3),
    "Asteroids-v5": (719.1, 47388.7),
    "Atlantis-v5": (12850, 29028.1),
    "BankHeist-v5": (14.2, 753.1),
    "BattleZone-v5": (2360, 37187.5),
    "BeamRider-v5": (363.9, 16926.5),
    "Berzerk-v5": (123.7, 2630.4),
    "Bowling-v5": (23.1, 160.7),
    "Boxing-v5": (0.1, 12.1),
    "Breakout-v5": (1.7, 30.5),
    "Centipede-v5": (2090.9, 12017),
    "ChopperCommand-v5": (811, 7387.8),
    "CrazyClimber-v5": (10780.5, 35829.4),
    "Defender-v5": (2874.5, 18688.9),
    "DemonAttack-v5": (152.1, 1971),
    "DoubleDunk-v5": (-18.6, -16.4),
    "Enduro-v5": (0, 860.5),
    "FishingDerby-v5": (-91.7, -38.7),
    "Freeway-v5": (0, 29.6),
    "Frostbite-v5": (65.2, 4334.7),
    "Gopher-v5": (257.6, 2412.5),
    "Gravitar-v5": (173, 3351.4),
    "Hero-v5": (1027, 30826.4),
    "IceHockey-v5": (-11.2, 0.9),
    "Jamesbond-v5": (29, 302.8),
    "Kangaroo-v5": (52, 3035),
    "Krull-v5": (1598, 2665.5),
    "KungFuMaster-v5": (258.5, 22736.3),
    "MontezumaRevenge-v5": (0, 4753.3),
    "MsPacman-v5": (307.3, 6951.6),
    "NameThisGame-v5": (2292.3, 8049),
    "Phoenix-v5": (761.4, 7242.6),
    "Pitfall-v5": (-229.4, 6463.7),
    "Pong-v5": (-20.7, 14.6),
    "PrivateEye-v5": (24.9, 69571.3),
    "Qbert-v5": (163.9, 13455),
    "Riverraid-v5": (1338.5, 17118),
    "RoadRunner-v5": (11.5, 7845),
    "Robotank-v5": (2.2, 11.9),
    "Seaquest-v5": (68.4, 42054.7),
    "Skiing-v5": (-17098.1, -4336.9),
    "Solaris-v5": (1236.3, 12326.7),
    "SpaceInvaders-v5": (148, 1668.7),
    "StarGunner-v5": (664, 10250),
    "Surround-v5": (-10, 6.5),
    "Tennis-v5": (-23.8, -8.3),
    "TimePilot-v5": (3568, 5229.2),
    "Tutankham-v5": (11.4, 167.6),
    "UpNDown-v5": (533.4, 11693.2),
    "Venture-v5": (0, 1187.5),
    "VideoPinball-v5": (16256.9, 17667.9),
    "WizardOfWor-v5": (563.5, 4756.5),
    "YarsRevenge-v5": (3092.9, 54576.9),
    "Zaxxon-v5": (32.5, 9173.3),
}
