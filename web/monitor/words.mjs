// The page's words in the language of ComfyUI's settings; in the code stands the English.

// Languages with a file beside this one: what stands for each English text, with {} for what is filled in. In `server` are
// those of the sentences that come from there.
const KNOWN = new Set(["zh"]);
// A longer text, or a longer sentence, quotes somebody: to look for patterns in it could take long.
const [LONGEST_TEXT, LONGEST] = [8000, 1000];
// Patterns that are looked for in all: a prompt of many commas is many parts, each again of such.
const MOST_TRIES = 30_000;
const BREAK = /(?<=[.!?]) (?=[A-Z"`])/;
let words = {};
let sentences = [];

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  return answer.ok ? await answer.json() : {};
}

/** From now on `say` speaks `language`, where there are words of it. */
export async function speak(language) {
  [words, sentences] = [{}, []];
  if (!KNOWN.has(language)) return;
  try {
    const [own, theirs] = await Promise.all([`./${language}.json`, `./server/${language}.json`].map(fetched));
    [words, sentences] = [own, Object.keys(theirs).map((english) => sentence(english, theirs[english]))];
  } catch (error) {
    console.warn("comfyui-tpu: the words could not be fetched", error); // English will do
  }
  // What is said as it is, then what several have between them and one word before a colon, else what has most words; a number
  // with its unit last, behind what has signs alone.
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

/** A template literal in that language: say`peak ${size} a chip`. */
export function say(texts, ...values) {
  const english = texts.join("{}");
  return filled(Object.hasOwn(words, english) ? words[english] : english, values);
}

/**
 * What is filled in before a unit is a number; before a comma it may have commas itself. Each hole ends where what is behind
 * it first stands, and that is never tried elsewhere: with many holes it would take a power of the text's length.
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

/** What the server said, in that language as far as there are words of it: of a sentence, of what is filled in, of each part. */
export function understood(said) {
  if (!sentences.length || said.length > LONGEST_TEXT) return said;
  const left = { tries: MOST_TRIES };
  return said.split("\n").map((line) => part(line, left)).join("\n");
}

/** What is quoted stays in one piece. */
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

/** Chinese has no spaces between its signs. */
function tight(before, after) {
  const isChinese = /\p{Script=Han} ?$/u.test(before) && /^ ?\p{Script=Han}/u.test(after);
  return isChinese ? before.trimEnd() + after.trimStart() : before + after;
}

/** One sentence. What only stands between others counts where one of these is understood, or all are numbers. */
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
