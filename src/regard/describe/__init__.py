"""Descriptions of attention as plain values: masks, biases, scores, positions, heads. No attention is computed here.

```
specs       spec.py (`Spec`), fingerprint.py (a spec without its tensors), serialized.py (as JSON and tensors)
content     content.py, code_reads.py (of functions), object_state.py (of objects), tensors.py (of tensors);
            outside_transforms.py (what a mask reads under `torch.func`)
masks       mask.py (`Mask`, `& | ~`), mask_by_rule.py (`Causal`, `Window` ...), mask_by_table.py (`Documents`,
            `TensorMask` ...), mask_by_term.py, mask_function.py (`MaskFunction`), check_mask.py, draw_mask.py
  bounds    interval.py (kept keys as intervals), rectangle_tables.py (look-ups for many rectangles)
  per call  by_row.py (a position for each row), ragged.py (a length for each row), some_heads.py (some heads alone)
  functions uses.py (does one use the batch row, the head?), term.py, term_extent.py (expressions of positions)
biases      bias.py, score_function.py (any function of the score, in the place of a bias)
scores      score.py
positions   position.py (`Rope`, `Sinusoidal`, `Learned`), rope_scaling.py, rotation.py (of pairs), position_table.py
features    feature.py, of linear attention
heads       heads.py
checks      require_tensor.py, whole_number.py, number.py, traced.py
advice      suggestions.py, not_a_spec.py (what to write instead)
```
"""
