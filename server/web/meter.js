// Live speculation figures of the running answer: tokens a second, tokens a pass, a strip of the last passes.

const SHOWN = 60; // passes in the strip
const WINDOW_MS = 2000; // speed is taken over this much time

export class Meter {
  constructor(speed, length, strip, legend) {
    this.speed = speed;
    this.length = length;
    this.strip = strip;
    this.legend = legend;
    this.drafters = []; // names in order of appearance; their index is their colour
    this.reset();
  }

  reset() {
    this.passes = [];
    this.times = [];
    this.tokens = 0;
    this.steps = 0;
    this._draw();
  }

  // Colour class of a drafter's tokens.
  colour(name) {
    let index = this.drafters.indexOf(name);
    if (index < 0) {
      index = this.drafters.push(name) - 1;
      const label = document.createElement("span");
      label.className = `d${index % 5}`;
      label.textContent = name;
      this.legend.append(label);
    }
    return `d${index % 5}`;
  }

  // One delta: `tokens` delivered, of which `accepted` were drafted.
  add(tokens, accepted, now = performance.now()) {
    if (!tokens) return;
    this.passes.push([tokens, accepted]);
    if (this.passes.length > SHOWN) this.passes.shift();
    this.tokens += tokens;
    this.steps += 1;
    this.times.push([now, tokens]);
    while (this.times.length > 2 && now - this.times[0][0] > WINDOW_MS) this.times.shift();
    this._draw();
  }

  // The server's own figures at the end of an answer.
  final(speculation, timings) {
    if (timings?.tokens_per_second) this.speed.value = timings.tokens_per_second.toFixed(0);
    if (speculation?.acceptance_length) this.length.value = speculation.acceptance_length.toFixed(2);
  }

  _draw() {
    if (this.times.length > 1) {
      const seconds = (this.times.at(-1)[0] - this.times[0][0]) / 1000;
      const tokens = this.times.slice(1).reduce((sum, [, n]) => sum + n, 0);
      if (seconds > 0) this.speed.value = (tokens / seconds).toFixed(0);
    }
    if (this.steps) this.length.value = (this.tokens / this.steps).toFixed(2);
    if (this._queued) return;
    this._queued = requestAnimationFrame(() => {
      this._queued = 0;
      this._paint();
    });
  }

  _paint() {
    const ctx = this.strip.getContext("2d");
    const { width, height } = this.strip;
    const style = getComputedStyle(document.body);
    const most = Math.max(4, ...this.passes.map(([n]) => n));
    ctx.clearRect(0, 0, width, height);
    this.passes.forEach(([tokens, accepted], i) => {
      const unit = (height - 2) / most;
      const x = (i * width) / SHOWN;
      const wide = width / SHOWN - 1;
      ctx.fillStyle = style.getPropertyValue("--accent");
      ctx.fillRect(x, height - accepted * unit, wide, accepted * unit);
      ctx.fillStyle = style.getPropertyValue("--muted");
      ctx.fillRect(x, height - tokens * unit, wide, (tokens - accepted) * unit);
    });
  }
}
