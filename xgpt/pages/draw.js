"use strict";
// What comes from a server is set as text, never as HTML.
const SVG = "http://www.w3.org/2000/svg";
// An address without the key with which the page's own address may begin: browsers fetch no address that has one.
const here = (path) => new URL(path, location.origin + location.pathname);
const byId = (id) => document.getElementById(id);
const number = (value, digits = 3) => value === null || value === undefined ? "-" : Number(Number(value).toPrecision(digits)).toString();

function shape(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function picture(id, label, width, height) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  byId(id).replaceChildren(svg);
  return svg;
}

function rows(id, table) {
  byId(id).replaceChildren(...table.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const place = row.appendChild(document.createElement("td"));
      if (cell instanceof Node) place.appendChild(cell); else place.textContent = cell;
    }
    return row;
  }));
}
