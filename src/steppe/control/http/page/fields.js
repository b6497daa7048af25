// Form fields generated from JSON Schema, and parsing of their texts.

import { html } from "./vendor/htm-preact.js";
import { formatValue, withSpaces } from "./format.js";

// The schema without null, which stands for an automatic choice.
export function withoutNull(schema) {
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

function expectedNumber(kind) {
  const bound = bounds(kind).toLowerCase();
  return (kind.type === "integer" ? "A whole number" : "A number") + (bound && `, ${bound}`);
}

// Parse one argument: a number, a boolean, a list, or a string.
function parseArgument(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// Parse name=value pairs, separated by commas outside of lists.
function parsePairs(text) {
  const found = text.split(/,(?![^[]*\])/).map((one) => one.trim()).filter(Boolean).map((one) => one.match(/^(\w+)\s*=\s*(.+)$/));
  if (found.includes(null)) throw new Error("Expected name=value pairs, separated by commas");
  return Object.fromEntries(found.map(([, name, given]) => [name, parseArgument(given)]));
}

// Parse a text according to its schema; undefined if it is empty. Throws an Error with a message for the reader.
export function parse(schema, text) {
  const kind = withoutNull(schema);
  if (text === "" || text === undefined) return undefined;
  if (kind.type === "boolean") return text === true || text === "true";
  if (kind.type === "object") return parsePairs(text);
  if (kind.type === "array") return text.split(/[,\s]+/).filter(Boolean).map(Number);
  if (kind.type !== "integer" && kind.type !== "number") return text;
  const value = Number(text.replaceAll(",", "").replaceAll("_", ""));
  const invalid = !Number.isFinite(value) || (kind.type === "integer" && !Number.isInteger(value)) ||
    value <= (kind.exclusiveMinimum ?? -Infinity) || value < (kind.minimum ?? -Infinity) ||
    value >= (kind.exclusiveMaximum ?? Infinity) || value > (kind.maximum ?? Infinity);
  if (invalid) throw new Error(expectedNumber(kind));
  return value;
}

// The placeholder of an empty field: its default value, or "auto" if the default depends on other settings.
function placeholder(kind, description = "") {
  if (kind.type === "object") return "name=value, …";
  if (kind.default !== undefined && kind.default !== null) return formatValue(kind.default);
  return description.includes("Default: ") ? "auto" : "";
}

function Choice({ id, kind, value, onChange, about }) {
  const choices = kind.type === "boolean" ? ["true", "false"] : kind.enum.map(String);
  const usual = placeholder(kind, "Default: ");
  return html`<select id=${id} aria-describedby=${about} value=${value} onChange=${(event) => onChange(event.target.value)}>
    <option value="">${usual} (default)</option>
    ${choices.filter((one) => one !== usual).map((one) => html`<option value=${one}>${one}</option>`)}
  </select>`;
}

export function Field({ id, name, schema, description, value = "", error, onChange }) {
  const kind = withoutNull(schema);
  const about = `${id}-about`;
  const numeric = kind.type === "integer" || kind.type === "number";
  const choice = kind.type === "boolean" || kind.enum;
  const bound = numeric ? bounds(kind) : "";
  return html`<div class=${`field ${error ? "wrong" : ""}`}>
    <label for=${id}>${withSpaces(name)}</label>
    ${choice
      ? html`<${Choice} id=${id} kind=${kind} value=${value} onChange=${onChange} about=${about} />`
      : html`<input id=${id} value=${value} autocomplete="off" spellcheck=${false} inputmode=${numeric ? "decimal" : null}
          aria-describedby=${about} aria-invalid=${error ? "true" : null} placeholder=${placeholder(kind, description)}
          onInput=${(event) => onChange(event.target.value)} />`}
    <p id=${about} class="about">
      ${error && html`<strong>${error}. </strong>`}${description}${bound && html` <span class="bound">${bound}.</span>`}
    </p>
  </div>`;
}
