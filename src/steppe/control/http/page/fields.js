// Fields made from JSON Schema, and what was typed into them as the values that the schema asks for.

import { html } from "./vendor/htm-preact.js";
import { shown, spaced } from "./words.js";

// The schema without the null that means "chosen for you".
export function plain(schema) {
  const kinds = (schema.anyOf || [schema]).filter((one) => one.type !== "null");
  return { ...schema, ...kinds[0], optional: Boolean(schema.anyOf?.some((one) => one.type === "null")) };
}

function bounds(kind) {
  const words = [];
  if (kind.exclusiveMinimum !== undefined) words.push(`more than ${kind.exclusiveMinimum}`);
  if (kind.minimum !== undefined) words.push(`at least ${kind.minimum}`);
  if (kind.exclusiveMaximum !== undefined && kind.exclusiveMaximum < 1e15) words.push(`less than ${kind.exclusiveMaximum}`);
  if (kind.maximum !== undefined && kind.maximum < 1e15) words.push(`at most ${kind.maximum}`);
  const text = words.join(", ");
  return text && text[0].toUpperCase() + text.slice(1);
}

function wanted(kind) {
  const bound = bounds(kind).toLowerCase();
  return (kind.type === "integer" ? "A whole number" : "A number") + (bound && `, ${bound}`);
}

// One value of a list of arguments: a number, a truth value, a list, or a word.
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// name=value pairs, with commas between them that are not inside a list.
function pairs(text) {
  const found = text.split(/,(?![^[]*\])/).map((one) => one.trim()).filter(Boolean).map((one) => one.match(/^(\w+)\s*=\s*(.+)$/));
  if (found.includes(null)) throw new Error("name=value, with commas between several");
  return Object.fromEntries(found.map(([, name, given]) => [name, parsed(given)]));
}

// undefined: left empty. Throws with the words for the reader.
export function read(schema, text) {
  const kind = plain(schema);
  if (text === "" || text === undefined) return undefined;
  if (kind.type === "boolean") return text === true || text === "true";
  if (kind.type === "object") return pairs(text);
  if (kind.type === "array") return text.split(/[,\s]+/).filter(Boolean).map(Number);
  if (kind.type !== "integer" && kind.type !== "number") return text;
  const value = Number(text.replaceAll(",", "").replaceAll("_", ""));
  const wrong = !Number.isFinite(value) || (kind.type === "integer" && !Number.isInteger(value)) ||
    value <= (kind.exclusiveMinimum ?? -Infinity) || value < (kind.minimum ?? -Infinity) ||
    value >= (kind.exclusiveMaximum ?? Infinity) || value > (kind.maximum ?? Infinity);
  if (wrong) throw new Error(wanted(kind));
  return value;
}

// What is taken where nothing is typed.
function standard(kind, description = "") {
  if (kind.type === "object") return "name=value, …";
  if (kind.default !== undefined && kind.default !== null) return shown(kind.default);
  return /if absent|likewise/.test(description) ? "auto" : "";
}

function Choice({ id, kind, value, onChange, about }) {
  const choices = kind.type === "boolean" ? ["true", "false"] : kind.enum.map(String);
  const usual = standard(kind, "if absent");
  return html`<select id=${id} aria-describedby=${about} value=${value} onChange=${(event) => onChange(event.target.value)}>
    <option value="">${usual} (default)</option>
    ${choices.filter((one) => one !== usual).map((one) => html`<option value=${one}>${one}</option>`)}
  </select>`;
}

export function Field({ id, name, schema, description, value = "", error, onChange }) {
  const kind = plain(schema);
  const about = `${id}-about`;
  const numeric = kind.type === "integer" || kind.type === "number";
  const choice = kind.type === "boolean" || kind.enum;
  const bound = numeric ? bounds(kind) : "";
  return html`<div class=${`field ${error ? "wrong" : ""}`}>
    <label for=${id}>${spaced(name)}</label>
    ${choice
      ? html`<${Choice} id=${id} kind=${kind} value=${value} onChange=${onChange} about=${about} />`
      : html`<input id=${id} value=${value} autocomplete="off" spellcheck=${false} inputmode=${numeric ? "decimal" : null}
          aria-describedby=${about} aria-invalid=${error ? "true" : null} placeholder=${standard(kind, description)}
          onInput=${(event) => onChange(event.target.value)} />`}
    <p id=${about} class="about">
      ${error && html`<strong>${error}. </strong>`}${description}${bound && html` <span class="bound">${bound}.</span>`}
    </p>
  </div>`;
}
