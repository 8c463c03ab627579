// What ran, the table of heads, and where every number comes from.

let sorted = { key: "rank", down: false };

function drawRun() {
  const written = tokens.length - report.prompt_tokens;
  $("lead").textContent =
    `${heads.length} heads in ${run.layers} layers read ${thousands(tokens.length)} tokens: ` +
    `${thousands(report.prompt_tokens)} of the prompt` +
    (written ? ` and ${written} that the model wrote` : "");
  const engines = [...new Set(run.backends)].map((name) => [
    name,
    run.backends.filter((other) => other === name).length,
  ]);
  const sharing = run.kv_heads < run.heads ? `${run.heads} heads on ${run.kv_heads} key heads` : `${run.heads} heads`;
  const facts = [
    [
      "parameters",
      run.parameters >= 1e9 ? (run.parameters / 1e9).toPrecision(3) : (run.parameters / 1e6).toPrecision(4),
      run.parameters >= 1e9 ? "billion" : "million",
      `${sharing}, ${run.head_dim} wide`,
    ],
    ["prompt", figure(run.tokens_per_second, 1), "tokens/s", run.machine],
    [
      "decoding",
      figure(run.decode_tokens_per_second, 1),
      run.decode_tokens_per_second === null ? "" : "tokens/s",
      written ? `${written} tokens, one by one` : "nothing was written",
    ],
    ["attention", figure(run.attention_gflop, 2), "GFLOP", `${thousands(run.pairs)} query-key pairs`],
    [
      "engine",
      engines.map(([name]) => name).join(", "),
      "",
      `ran ${engines.length === 1 ? `all ${run.layers}` : engines.map(([, count]) => count).join(" and ")} layers`,
    ],
    [
      "differs from eager by",
      run.eager_difference === null ? "–" : run.eager_difference.toExponential(1),
      "",
      run.eager_difference === null ? "was not compared" : "largest difference of a logit",
    ],
  ];
  $("run").replaceChildren(
    ...facts.map(([label, value, unit, note]) =>
      make("div", make("dt", label), make("dd", make("b", value), ` ${unit}`, make("small", note))),
    ),
  );
}

// ---- the table ------------------------------------------------------------------------------------------------------

function makeTable() {
  const columns = [
    { key: "rank", label: "head" },
    { key: "kind", label: "kind" },
    ...shown,
    measureNamed("remarkable"),
  ].filter(Boolean);
  const header = make("tr");
  for (const { key, label, unit } of columns) {
    const button = press(label, () => sortBy(key), definitions[key]?.formula);
    const cell = make("th", button, unit && !label.includes(unit) ? make("small", unit) : "", { scope: "col" });
    cell.dataset.key = key;
    header.append(cell);
  }
  $("table").tHead.append(header);
  $("table").tBodies[0].append(...heads.map((head) => rowOf(head, columns)));
}

function rowOf(head, columns) {
  const row = make("tr");
  row.dataset.head = head.name;
  for (const { key, chance } of columns) {
    const cell = make(key === "rank" ? "th" : "td");
    if (key === "rank") {
      cell.scope = "row";
      const open = (event) => (event.preventDefault(), show({ head: head.name }), scrollTo(0, 0));
      cell.append(make("a", head.name, { href: `#head=${head.name}`, onclick: open }));
    } else if (key === "kind") cell.append(badge(head.kind));
    else {
      const top = Math.max(...heads.map((other) => other[key] ?? 0)) || 1;
      cell.style.setProperty("--share", Math.max(0, (head[key] ?? 0) / top));
      cell.append(figure(head[key]), make("small", chance && head[chance] !== null ? figure(head[chance]) : ""));
    }
    row.append(cell);
  }
  row.addEventListener("mouseenter", () => cells.get(head.name).button.classList.add("lit"));
  row.addEventListener("mouseleave", () => cells.get(head.name).button.classList.remove("lit"));
  return row;
}

function sortBy(key) {
  sorted = { key, down: sorted.key === key ? !sorted.down : key !== "rank" && key !== "kind" };
  const { down } = sorted;
  const compare = (a, b) =>
    (typeof a[key] === "string" ? a[key].localeCompare(b[key]) : (a[key] ?? -Infinity) - (b[key] ?? -Infinity)) *
      (down ? -1 : 1) || a.rank - b.rank;
  const rows = new Map([...$("table").tBodies[0].rows].map((row) => [row.dataset.head, row]));
  $("table").tBodies[0].append(...[...heads].sort(compare).map((head) => rows.get(head.name)));
  drawTable();
}

function drawTable() {
  const { key, down } = sorted;
  for (const row of $("table").tBodies[0].rows) {
    row.hidden = !passes(byName.get(row.dataset.head));
    row.classList.toggle("current", row.dataset.head === state.head);
  }
  for (const cell of $("table").tHead.rows[0].cells)
    cell.ariaSort = cell.dataset.key === key ? (down ? "descending" : "ascending") : "none";
  const order = key === "rank" ? "most remarkable first" : `by ${measureNamed(key)?.label ?? key}`;
  $("list-of").textContent = `${heads.filter(passes).length} heads, ${order}; small figures are chance`;
}

// ---- where the numbers come from ------------------------------------------------------------------------------------

function drawNotes() {
  $("definitions").replaceChildren(
    ...Object.entries(definitions).flatMap(([key, { formula, source, chance }]) => [
      make("dt", measureNamed(key)?.label ?? key.replaceAll("_", " ")),
      make("dd", formula, make("small", [chance && `Chance: ${chance}.`, source].filter(Boolean).join(" "))),
    ]),
  );
  const pooled = heads.find((head) => head.picture)?.picture.pooled ?? 1;
  const note =
    pooled > 1
      ? ` The text is long: a cell holds the mean over ${pooled} × ${pooled} tokens, and what is shown is the share ` +
        "of a query's attention that goes to all the keys of the cell."
      : "";
  $("precision").textContent =
    "The pictures hold each weight w as one byte, 255·√w: no weight is off by more than 0.004. The scores were " +
    `measured on the full weights, not on the pictures.${note}`;
  const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
  const times = Object.entries(run.seconds).map(([name, seconds]) => `${name} ${figure(seconds, 1)} s`);
  $("made").textContent = [run.model, run.machine, ...versions, ...times].join(" · ");
}
