// Live speculation figures of an answer: tokens a second, tokens a pass, a strip of the last passes.

const SHOWN = 60; // passes in the strip
const WINDOW_MS = 2000; // speed is taken over this much time
const COLOURS = { suffix: "d0", heads: "d1", model: "d2", student: "d3" };

// The class that colours a drafter's tokens.
export function colour(drafter) {
  return COLOURS[drafter] ?? "d4";
}

// What is counted of one answer while it streams. Every pass of the model brings the drafts it accepted, then one token of its
// own: so the tokens that were not drafted count the passes, however the deltas were merged or spread on their way.
export class Tally {
  constructor() {
    this.passes = []; // [tokens, accepted] of the last ones
    this.speed = null; // tokens a second
    this.length = null; // tokens a pass
    this._open = [0, 0]; // the pass whose own token has not come yet
    this._times = []; // [ms, tokens]
    this._tokens = 0;
    this._passes = 0;
  }

  add({ tokens = 0, accepted = 0 }, now = performance.now()) {
    if (!tokens) return;
    this._cut(tokens, accepted);
    this._times.push([now, tokens]);
    while (this._times.length > 2 && now - this._times[0][0] > WINDOW_MS) this._times.shift();
    const seconds = (now - this._times[0][0]) / 1000;
    const recent = this._times.reduce((sum, [, count], i) => sum + (i ? count : 0), 0);
    if (seconds > 0) this.speed = recent / seconds;
  }

  // Divide tokens into passes. Several passes in one delta are shown alike.
  _cut(tokens, accepted) {
    this._open[0] += tokens;
    this._open[1] += accepted;
    const passes = this._open[0] - this._open[1];
    if (!passes) return;
    const [all, drafted] = this._open;
    for (let i = 0; i < passes; i++) this.passes.push([all / passes, drafted / passes]);
    this.passes.splice(0, this.passes.length - SHOWN);
    this._open = [0, 0];
    this._tokens += all;
    this._passes += passes;
    this.length = this._tokens / this._passes;
  }

  // The server's own figures at the end.
  finish({ speculation, timings }) {
    this.speed = timings?.tokens_per_second ?? this.speed;
    this.length = speculation?.acceptance_length ?? this.length;
  }
}

// Shows one tally at a time.
export class Meter {
  constructor(speed, length, strip) {
    this.speed = speed;
    this.length = length;
    this.strip = strip;
    this.show(new Tally());
    new ResizeObserver(() => this.draw()).observe(strip);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(tally) {
    this.tally = tally;
    this.draw();
  }

  // Draw soon, once however often it is called.
  draw() {
    this._frame ??= requestAnimationFrame(() => {
      this._frame = null;
      this.speed.value = this.tally.speed?.toFixed(0) ?? "–";
      this.length.value = this.tally.length?.toFixed(2) ?? "–";
      this._paint();
    });
  }

  _paint() {
    const { strip } = this;
    const [width, height] = [strip.clientWidth, strip.clientHeight];
    const scale = globalThis.devicePixelRatio || 1;
    strip.width = Math.round(width * scale);
    strip.height = Math.round(height * scale);
    const context = strip.getContext("2d");
    const style = getComputedStyle(strip);
    const unit = height / Math.max(5, ...this.tally.passes.map(([tokens]) => tokens));
    const step = width / SHOWN;
    const bar = (i, low, high) => {
      // whole device pixels, so that the edges are sharp
      const x = [i * step, (i + 1) * step].map((v) => Math.round(v * scale));
      const y = [height - high * unit, height - low * unit].map((v) => Math.round(v * scale));
      context.fillRect(x[0], y[0], x[1] - x[0] - Math.ceil(scale / 2), y[1] - y[0]);
    };
    this.tally.passes.forEach(([tokens, accepted], i) => {
      context.fillStyle = style.getPropertyValue("--accent");
      bar(i, 0, accepted);
      context.fillStyle = style.getPropertyValue("--bar");
      bar(i, accepted, tokens);
    });
  }
}
