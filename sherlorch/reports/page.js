"use strict";
(() => {
  const nodes = JSON.parse(document.getElementById("nodes").textContent);
  const details = document.getElementById("details");
  const rows = document.getElementById("rows");

  const make = (tag, text, parent) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const name = (seq) => {
    const node = nodes[seq];
    return node ? `[${seq}] ${node.name || node.op_name}` : `[${seq}]`;
  };
  const link = (seq, parent) => {
    if (!nodes[seq]) return make("span", `${name(seq)} `, parent);
    const button = make("button", name(seq), parent);
    button.addEventListener("click", () => show(seq));
    return button;
  };
  const clear = () => {
    for (const chosen of document.querySelectorAll(".chosen")) chosen.classList.remove("chosen");
    details.replaceChildren();
    details.classList.add("open");
    const close = make("button", "close", details);
    close.className = "close";
    close.addEventListener("click", () => details.classList.remove("open"));
  };
  const field = (list, label, value) => {
    if (value === undefined || value === "") return;
    make("dt", label, list);
    const cell = make("dd", undefined, list);
    if (Array.isArray(value)) for (const seq of value) link(seq, cell);
    else cell.textContent = value;
  };
  const number = (value) =>
    typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  const stats = (row) => {
    const bad = [["NaN", row.nan], ["+inf", row.posinf], ["-inf", row.neginf]].filter(([, count]) => count);
    const range = row.min === null ? "no finite value" : `${number(row.min)} to ${number(row.max)}`;
    return [range, ...bad.map(([kind, count]) => `${count} ${kind} of ${row.numel}`)].join(", ");
  };
  const show = (seq) => {
    const node = nodes[seq];
    if (!node) return;
    clear();
    for (const shape of document.querySelectorAll(`[data-seq="${seq}"]`)) shape.classList.add("chosen");
    make("h3", name(seq), details);
    const list = make("dl", undefined, details);
    field(list, "op", node.op_name);
    field(list, "state", node.state + (node.origin ? `, ${node.origin}` : "") + (node.inherited ? ", by a law" : ""));
    const shape = node.shape || [];
    field(list, "shape", `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`);
    field(list, "dtype", node.dtype);
    field(list, "device", node.device);
    field(list, "phase", node.phase);
    field(list, "module", node.module_path);
    field(list, "line", node.location);
    field(list, "autograd", node.autograd_node);
    if (node.forward !== undefined) field(list, "forward", [node.forward]);
    field(list, "inputs", node.parents);
    if (!node.evidence) return;
    for (const row of node.evidence.inputs) field(list, row.name || "in", stats(row));
    field(list, "out", stats(node.evidence.result));
    if (node.evidence.index) field(list, "first bad", `[${node.evidence.index.join(", ")}]`);
  };
  const unfold = (fold) => {
    clear();
    fold.classList.add("chosen");
    make("h3", fold.textContent, details);
    for (const seq of fold.dataset.fold.split(" ")) make("div", undefined, details).append(link(seq));
  };
  const choose = (event) => {
    const place = event.target.closest("[data-seq], [data-fold]");
    if (!place) return;
    if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    if (place.dataset.fold) unfold(place);
    else show(place.dataset.seq);
  };
  document.addEventListener("click", choose);
  document.addEventListener("keydown", choose);

  if (!rows) return;
  const culprit = document.querySelector(".node.culprit");
  const start = culprit && rows.querySelector(`[data-seq="${culprit.dataset.seq}"]`);
  if (start) rows.scrollTop = start.offsetTop - rows.offsetTop - 60;
  const all = [...rows.children].map((row) => [row, row.textContent.toLowerCase()]);
  document.getElementById("search").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const [row, text] of all) {
      row.hidden = !words.every((word) => text.includes(word));
      if (!row.hidden) found += 1;
    }
    document.getElementById("found").textContent = `${found} of ${all.length}`;
  });
})();
