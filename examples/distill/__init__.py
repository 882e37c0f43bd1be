"""A drafter for your own target, from the target's own answers: prompts, answers, features, training, evaluation.

Each stage is a module that reads the files of the stage before it from the run folder; ``README.md`` beside this file tells how to use
them. Not part of the installed package.
"""
