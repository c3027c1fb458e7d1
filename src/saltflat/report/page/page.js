"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  // Okabe and Ito's colours, which the colour-blind tell apart; lighter where the paper is dark.
  const themes = {
    light: {
      ink: "#1b1f23", faint: "#59636e", line: "#e3e7ea", paper: "#ffffff",
      palette: ["#0072b2", "#d55e00", "#007a5e", "#a8558a", "#9a6a00", "#2f86b5", "#333333", "#7f3b08", "#5b4ea3", "#4d7a1f", "#b0305c"],
    },
    dark: {
      ink: "#e6e8ea", faint: "#a0a8b0", line: "#2b3137", paper: "#14171a",
      palette: ["#56b4e9", "#f08a45", "#3cc69d", "#e39cc6", "#e6b422", "#8ecdf0", "#d0d0d0", "#d8a37a", "#a79be8", "#a5cc78", "#f08bb0"],
    },
  };
  const root = document.documentElement;
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // by the button; else the system's
  let printing = false;
  const theme = () => (printing ? "light" : chosen || (preferred.matches ? "dark" : "light"));

  function coloured(value, key, look) {
    if (typeof value === "string" && value[0] === "@" && /color$/.test(key)) {
      const name = value.slice(1);
      return look[name] || look.palette[Number(name) % look.palette.length];
    }
    if (Array.isArray(value)) return value.map((each) => coloured(each, key, look));
    if (value && typeof value === "object") {
      const copy = {};
      for (const name of Object.keys(value)) copy[name] = coloured(value[name], name, look);
      return copy;
    }
    return value;
  }

  function axis(given, look) {
    return Object.assign(
      { gridcolor: look.line, linecolor: look.faint, zeroline: false, automargin: true, ticks: "", tickfont: { color: look.faint } },
      given,
      { title: Object.assign({ font: { size: 12, color: look.faint }, standoff: 8 }, given.title) }
    );
  }

  function layoutOf(figure, look, narrow, height) {
    const given = coloured(figure.layout, "", look);
    const base = {
      height: height,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: look.ink },
      margin: { l: 56, r: 16, t: 12, b: 44 },
      showlegend: false,
      hoverlabel: { bgcolor: look.paper, bordercolor: look.faint, font: { color: look.ink }, align: "left" },
      dragmode: false,
    };
    const layout = Object.assign(base, given, { margin: Object.assign(base.margin, given.margin) });
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) layout[name] = axis(layout[name], look);
    }
    if (layout.scene) {
      for (const name of ["xaxis", "yaxis", "zaxis"]) {
        layout.scene[name] = Object.assign(axis(layout.scene[name], look), { showbackground: false, color: look.faint });
        delete layout.scene[name].automargin;
        delete layout.scene[name].title.standoff;
      }
      layout.dragmode = "orbit";
      layout.margin = { l: 0, r: 0, t: 0, b: 0 };
      if (narrow && layout.scene.camera) layout.scene.camera.eye = { x: 2, y: 2, z: 1.3 };
    }
    if (narrow && (layout.scene || (layout.yaxis && layout.yaxis.scaleanchor))) layout.height = 330;
    if (narrow && layout.annotations && layout.margin.r > 60) {
      // No room for names beside the lines: they go below.
      layout.annotations = layout.annotations.filter((each) => each.name !== "label");
      layout.margin.r = 16;
      layout.showlegend = true;
      layout.legend = { orientation: "h", y: -0.22, yanchor: "top", x: 0, font: { size: 11 } };
      layout.height = height + 22 * Math.ceil(figure.traces.length / 1.5);
    }
    return layout;
  }

  function webgl() {
    const canvas = document.createElement("canvas");
    return Boolean(canvas.getContext("webgl2") || canvas.getContext("webgl"));
  }

  function draw(place) {
    const figure = figures[Number(place.dataset.figure)];
    if (figure.layout.scene && !webgl()) {
      place.innerHTML = "";
      const words = document.createElement("p");
      words.className = "missing";
      words.textContent = "This browser has no WebGL, which a surface needs. The contours show the same.";
      place.style.height = "auto";
      place.append(words);
      return;
    }
    const look = themes[theme()];
    place.dataset.height = place.dataset.height || parseInt(place.style.height, 10);
    const layout = layoutOf(figure, look, place.clientWidth < 480, Number(place.dataset.height));
    place.style.height = layout.height + "px";
    Plotly.react(place, coloured(figure.traces, "", look), layout, { displayModeBar: false, responsive: true, doubleClick: false });
  }

  const places = Array.from(document.querySelectorAll(".plot"));
  const drawAll = () => places.forEach(draw);

  function show() {
    root.dataset.theme = theme();
    const dark = theme() === "dark";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(dark));
    drawAll();
  }
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    show();
  });
  preferred.addEventListener("change", show);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) drawAll(); // not when a phone's address bar goes away
    width = window.innerWidth;
  });
  window.addEventListener("beforeprint", () => { printing = true; show(); });
  window.addEventListener("afterprint", () => { printing = false; show(); });

  function download(url, name) {
    const link = document.createElement("a");
    link.href = url;
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
  }

  document.querySelectorAll("[data-save]").forEach((each) => {
    each.addEventListener("click", () => {
      const number = Number(each.dataset.figure);
      const figure = figures[number];
      const name = figure.name.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "figure";
      if (each.dataset.save === "csv") {
        const url = URL.createObjectURL(new Blob([figure.csv], { type: "text/csv" }));
        download(url, name + ".csv");
        setTimeout(() => URL.revokeObjectURL(url), 1000);
        return;
      }
      // On white paper, whatever the screen shows.
      const layout = layoutOf(figure, themes.light, false, 560);
      layout.paper_bgcolor = layout.plot_bgcolor = "#ffffff";
      const picture = { data: coloured(figure.traces, "", themes.light), layout: layout };
      const size = { format: "png", width: 960, height: 560, scale: 2 };
      Plotly.toImage(picture, size).then((url) => download(url, name + ".png"));
    });
  });

  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    const [p, q] = [a !== "" && !isNaN(x), b !== "" && !isNaN(y)];
    if (p && q) return x - y;
    return p === q ? a.localeCompare(b) : p ? -1 : 1;
  }

  document.querySelectorAll("table").forEach((table) => {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const key = (row) => row.cells[column].dataset.key;
        Array.from(body.rows)
          .sort((a, b) => (down ? -1 : 1) * compare(key(a), key(b)))
          .forEach((row) => body.append(row));
      });
    });
  });

  show();
})();
