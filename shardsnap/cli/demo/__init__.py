"""The decoupled-PPO demo: one training run, three ways to get old_log_prob, compared bit for bit.

command.py     the options, and the exit status
ranks.py       one process per rank
settings.py    what a run does
model.py       a small transformer, and the three FSDP wrappers around it
batches.py     mini-batches out of demo_text.txt
training.py    the cycles: old_log_prob under pi_old, then a PPO step of the live weights
old_policy.py  the three ways to look through pi_old
helpers.py     verl-style helpers and shardsnap behind the same three calls
clock.py       seconds and bytes per verb
comparison.py  one wrapper, all three ways: what each rank runs
results.py     the figures, as they are printed and written to JSON
printing.py    tables
"""
