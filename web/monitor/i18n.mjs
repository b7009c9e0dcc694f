// Translates the page's texts into the language of ComfyUI's settings; the code has the English texts.

// Languages with a file next to this one: translations by English text, with {} for inserted values. `server` has those of
// the server's sentences.
const KNOWN = new Set(["zh"]);
// Longer texts and sentences contain quotations; matching patterns in them could be slow.
const [LONGEST_TEXT, LONGEST] = [8000, 1000];
// Limit of matched patterns per text: a prompt with many commas has many parts, which are split again.
const MOST_TRIES = 30_000;
const BREAK = /(?<=[.!?]) (?=[A-Z"`])/;
let words = {};
let sentences = [];

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  return answer.ok ? await answer.json() : {};
}

/** Set the language of say; English if there are no translations. */
export async function speak(language) {
  [words, sentences] = [{}, []];
  if (!KNOWN.has(language)) return;
  try {
    const [own, theirs] = await Promise.all([`./${language}.json`, `./server/${language}.json`].map(fetched));
    [words, sentences] = [own, Object.keys(theirs).map((english) => sentence(english, theirs[english]))];
  } catch (error) {
    console.warn("comfyui-tpu: the words could not be fetched", error); // English will do
  }
  // Order of patterns: literal texts, separators and a word before a colon, then by number of words; patterns of signs alone,
  // and last a number with its unit.
  sentences.sort((one, other) => rank(other) - rank(one));
}

function rank({ holes, letters, isFirst }) {
  if (letters === 1) return -1;
  if (!holes.length) return 2 * LONGEST;
  return isFirst ? LONGEST : letters;
}

function filled(template, values) {
  let next = 0;
  return template.replace(/\{\}/g, () => String(values[next++]));
}

/** Translate a template literal: say`peak ${size} a chip`. */
export function say(texts, ...values) {
  const english = texts.join("{}");
  return filled(Object.hasOwn(words, english) ? words[english] : english, values);
}

/**
 * A value before a unit is a number; before a comma it may contain commas. Each hole ends at the first occurrence of the text
 * after it, without backtracking, which would take exponential time with many holes.
 */
function sentence(english, translated) {
  const [first, ...parts] = english.split("{}").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const isNumber = (part) => /^( s\b|k )/.test(part ?? "");
  let [pattern, open] = [`^${first}`, ""];
  parts.forEach((part, index) => {
    const hole = isNumber(part) ? "[\\d.]{1,20}" : part.startsWith(",") ? ".*" : ".*?";
    open += `(?<h${index}>${hole})${part}`;
    if (part.startsWith(",") || isNumber(parts[index + 1]) || index === parts.length - 1) return;
    pattern += `(?=(?<all${index}>${open}))\\k<all${index}>`;
    open = "";
  });
  const letters = english.match(/\p{L}/gu)?.length ?? 0;
  const isList = english === "{}, or {}" || english === "{}; {}";
  return {
    pattern: new RegExp(`${pattern}${open}$`, "s"),
    holes: parts.map((_, index) => `h${index}`),
    translated: translated.split("{}"),
    letters,
    isList,
    isFirst: isList || /^\w+: \{\}$/.test(english),
    isFrame: translated === "{}" || (letters < 4 && /^\{\}.*\{\}\.?$/.test(english)),
  };
}

/** Translate a server message as far as possible: its sentences, inserted values and parts. */
export function understood(said) {
  if (!sentences.length || said.length > LONGEST_TEXT) return said;
  const left = { tries: MOST_TRIES };
  return said.split("\n").map((line) => part(line, left)).join("\n");
}

/** Split a text without splitting quotations. */
function sentencesOf(said) {
  const found = [];
  for (const piece of said.split(BREAK)) {
    const isQuoting = (found.at(-1)?.split('"').length ?? 1) % 2 === 0;
    found.push(isQuoting ? `${found.pop()} ${piece}` : piece);
  }
  return found;
}

function part(said, left) {
  const pieces = sentencesOf(said.replaceAll("\u00a0", " "));
  if (pieces.length === 1) return one(said, pieces[0], left);
  let whole = "";
  for (const piece of pieces) {
    let found = one(piece, piece, left);
    const bare = piece.slice(0, -1);
    if (found === piece && piece.endsWith(".") && (found = one(bare, bare, left)) === bare) found = piece;
    else if (piece.endsWith(".") && !/[.。]$/.test(found)) found += "。";
    whole += whole && !/[。！？]$/.test(whole) ? ` ${found}` : found;
  }
  return whole;
}

/** Remove spaces between Chinese characters. */
function tight(before, after) {
  const isChinese = /\p{Script=Han} ?$/u.test(before) && /^ ?\p{Script=Han}/u.test(after);
  return isChinese ? before.trimEnd() + after.trimStart() : before + after;
}

/** Translate one sentence. A separator counts only if one of its neighbours is translated, or all are numbers. */
function one(said, plain, left) {
  if (plain.length > LONGEST) return said;
  const isWhole = /[.!?]$/.test(plain);
  for (const { pattern, holes, translated, letters, isList, isFrame } of sentences) {
    const isUnit = letters === 1;
    if (isUnit && plain.includes(", ")) return plain.split(", ").map((each) => part(each, left)).join(", ");
    if (left.tries-- <= 0) return said;
    const groups = isList && isWhole ? null : pattern.exec(plain);
    if (!groups) continue;
    const given = holes.map((hole) => groups.groups[hole]);
    const values = given.map((each) => part(each, left));
    const isStrange = values.every((value, index) => value === given[index]) && /\p{L}/u.test(values.join(""));
    if (isFrame && isStrange) continue;
    return translated.reduce((whole, text, index) => tight(tight(whole, values[index - 1]), text));
  }
  return said;
}
