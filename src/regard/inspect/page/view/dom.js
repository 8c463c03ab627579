// Elements of the page.

export const $ = (id) => document.getElementById(id);
export const stopEvent = (event) => (event.preventDefault(), event.stopPropagation());
export const on = (node, event, act, options) => node.addEventListener(event, act, options);

// An element: make("span.dim", "text", otherElement, { title: "a property" }).
export function make(what, ...inside) {
  const [tag, ...names] = what.split(".");
  const node = document.createElement(tag);
  node.className = names.join(" ");
  for (const item of inside) item?.constructor === Object ? Object.assign(node, item) : node.append(item);
  return node;
}

export const makeButton = (text, onclick, title = "") => make("button", text, { type: "button", onclick, title });
