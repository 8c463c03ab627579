"""Where the controls and the words of an open page are: what overlaps, and what is cut."""

FIND = """
() => {
  const shown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest(".unseen");
  const away = (node) => node.closest("#grid, #text, .scroll"); // pictures and words in boxes of their own
  const inner = ({ left, top, right, bottom }, by, across = by) =>
    [left + across, top + by, right - across, bottom - by];
  const name = (node) => node.id || node.textContent.trim().slice(0, 30) || node.className;
  const named = "button, select, input, summary, h1, h2, h3, #matrix, #key, #key span, .badge";
  const controls = [...document.querySelectorAll(named)]
    .filter((node) => shown(node) && !away(node))
    .map((node) => {
      const across = node.matches("#key span") ? -2 : 1; // numbers need a gap, borders may be shared
      return { node, name: name(node), box: inner(node.getBoundingClientRect(), 1, across) };
    });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), words = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || !shown(parent) || away(parent) || parent.closest("script, style, option")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) words.push({ node: parent, name: node.data.trim(), box: inner(box, 1) });
  }
  const cross = ([a, b, c, d], [e, f, g, h]) => a < g && e < c && b < h && f < d;
  const kin = (a, b) => a.contains(b) || b.contains(a);
  const found = [];
  const all = [...controls, ...words];
  controls.forEach((one, n) => all.forEach((other, m) => {
    const key = one.node.id === "key" || other.node.closest("#key"); // it lies in the picture's empty half
    if (m > n && !kin(one.node, other.node) && !(key && (one.node.id === "matrix" || other.node.id === "matrix")))
      if (cross(one.box, other.box)) found.push(`${one.name} overlaps ${other.name}`);
  }));
  for (const { node, name, box } of all) {
    if (box[2] > document.documentElement.clientWidth + 1 || box[0] < -1) found.push(`${name} is beside the page`);
    for (let outer = node; outer; outer = outer.parentElement) {
      if (!/hidden|clip/.test(getComputedStyle(outer).overflowX)) continue;
      const [left, top, right, bottom] = inner(outer.getBoundingClientRect(), -1);
      if (box[0] < left || box[1] < top || box[2] > right || box[3] > bottom) found.push(`${name} is cut`);
    }
  }
  return [...new Set(found)];
}
"""


def faults(tab):
    """Controls and headings that overlap one another or any words, and words that are cut or beside the page."""
    return tab.evaluate(FIND)
