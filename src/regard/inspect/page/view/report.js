// The report that this file carries: heads and their scores, tokens, definitions; differences to another model.

const { min, max, abs } = Math;

export const report = JSON.parse(document.getElementById("report").textContent);
export const run = report.run;
export const tokens = report.tokens;
export const definitions = report.definitions;
export const causal = report.causal; // no query attends to a later key
export const otherReport = report.other ?? null; // the report of the model that this one is compared with

export const measures = report.measures.map((key) => ({
  key,
  label: labelOf(key),
  unit: definitions[key]?.unit ?? "",
}));
export const heads = headsOf(report);
export const byName = new Map(heads.map((head) => [head.name, head]));
export const otherHeads = otherReport ? headsOf(otherReport, true) : [];
export const otherByName = new Map(otherHeads.map((head) => [head.name, head]));
export const sameHeads = otherHeads.length === heads.length && heads.every((head) => otherByName.has(head.name));
export const otherTokens = otherReport?.tokens ?? tokens;
const firstOther = tokens.findIndex((token, n) => token !== otherTokens[n]);
export const sharedTokens = firstOther < 0 ? tokens.length : firstOther; // from the first on
export const samePrompt =
  sharedTokens >= report.prompt_tokens && (otherReport ?? report).prompt_tokens === report.prompt_tokens;
export const sameLength = otherTokens.length === tokens.length;
export const kinds = [...new Set(heads.map((head) => head.kind))];
if (sameHeads) measures.push(...differences());

export function labelOf(key) {
  return definitions[key]?.label || key.replaceAll("_", " ");
}

function headsOf(source, foreign = false) {
  const captions = new Map(source.close_ups.map((close) => [close.head, close]));
  return source.heads.map((head, rank) => {
    const name = `${head.layer}.${head.head}`;
    return { ...head, rank, name, foreign, picture: null, caption: captions.get(name), close: null };
  });
}

// Each measure less that of the same head of the other model: a measure of its own, to colour, sort and filter by.
function differences() {
  const shared = measures.filter(({ key }) => otherReport.measures.includes(key));
  for (const { key } of shared)
    for (const head of heads) {
      const [mine, other] = [valueOf(head, key), valueOf(otherByName.get(head.name), key)];
      if (mine !== null && other !== null) head.scores[`Δ${key}`] = [mine - other];
    }
  return shared.map(({ key, label, unit }) => ({ key: `Δ${key}`, label: `Δ ${label}`, unit, of: key }));
}

// A score is [value, chance, low, high]; what is missing is null.
export function scoreOf(head, key) {
  const [value = null, chance = null, low = null, high = null] = head?.scores[key] ?? [];
  return { value, chance, low, high };
}

export function valueOf(head, key) {
  return head?.scores[key]?.[0] ?? null;
}

export const measureNamed = (key) => measures.find((measure) => measure.key === key);

// The least and greatest value of a measure in both models, and of its chance value unless that is far away; the range
// always includes 0, and 1 if the measure is a share.
export function rangeOf(key) {
  const values = [...heads, ...otherHeads].map((head) => valueOf(head, key)).filter((value) => value !== null);
  const furthest = max(...values.map(abs), 1e-9);
  if (measureNamed(key)?.of) return [-furthest, furthest];
  const chances = heads.map((head) => scoreOf(head, key).chance),
    highest = max(0, ...values),
    greatest = max(highest, ...chances.filter((chance) => chance < 3 * highest));
  const share = greatest > 0.25 && greatest <= 1 && key !== "remarkable";
  return [min(0, ...values), share ? 1 : greatest || 1];
}
