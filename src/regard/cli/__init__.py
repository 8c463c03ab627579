"""The command `regard`. What a command needs is imported when it runs, so help and wrong arguments answer at once.

```
main.py     the grammar of all commands, and the exit codes
script.py   a program of the user's: `python -m regard script.py`

inspect     inspect.py; survey_view.py, heads_table.py, model_comparison.py (its tables)
generate    generate.py, generate_options.py (options); generate_text.py (the run), generation.py (one generation),
            text_stream.py (tokens as text), generation_report.py (speed and memory)
evaluate    evaluate.py (options), evaluation.py (the run)
bench       bench.py
cost        cost.py, cost_view.py (the table), cost_plot.py (the picture)
doctor      doctor.py (the report), diagnosis.py (what it reports)

argument_types.py                   values of options: counts, tokens, layers, heads, shares
prompt.py                           the prompt: a text, a file, or stdin
expression_names.py, expression.py  masks and biases from a line of text: names without torch, then the values
outputs.py                          files that are written: checked before the work, never replaced by mistake
progress.py                         progress bars
byte_size.py, durations.py          bytes and times with their units
token_count.py                      numbers of tokens
quoted.py                           text of the user in a message
```
"""
