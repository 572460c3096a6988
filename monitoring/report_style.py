"""The report's style sheets: for the page, and for a picture that stands alone.

Colours are Okabe and Ito's, told apart by colour-blind readers, and every mark differs in
shape or dash as well. Both follow the reader's light or dark mode.
"""

LIGHT = """--bg:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6776;--line:#dfe4ea;--loss:#0072b2;
--bad:#c2410c;--good:#00795a;--warn:#b45309;--ghost:#e08a3c;--stripe:#56b4e9;--stripeback:#e3f1fa;
--h0:#7f1d1d;--h1:#d55e00;--h2:#f0b35a;--h3:#4f8fba;--h4:#8ab5cf;--h5:#bcd3e0;--h6:#e3e8ed;
--chip:#eef1f5"""

DARK = """--bg:#0e131a;--card:#171e28;--ink:#e8edf3;--soft:#97a4b4;--line:#2a3441;--loss:#56b4e9;
--bad:#ff8a4c;--good:#2fc79a;--warn:#f0b429;--ghost:#c9803f;--stripe:#56b4e9;--stripeback:#1b3345;
--h0:#ff6b4a;--h1:#d55e00;--h2:#a8752c;--h3:#2f7aa6;--h4:#336487;--h5:#33506a;--h6:#2f3a47;
--chip:#202a36"""

CHART = """
svg{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text{fill:var(--ink)}svg .axis{fill:var(--soft);font-size:11.5px}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .note{font-size:12px}
svg .strong{font-weight:650}svg .soft{fill:var(--soft)}
.grid{stroke:var(--line);fill:none}.rule{stroke:var(--soft);fill:none}
.kept{stroke:var(--loss);stroke-width:1.9;fill:none;stroke-linejoin:round}
.ghost{stroke:var(--ghost);stroke-width:1.8;stroke-dasharray:5 2.5;fill:none;opacity:.9}
.ghost-dot{fill:var(--ghost);opacity:.55}
.skip-dot{fill:none;stroke:var(--bad);stroke-width:1.6}
.mark{stroke:var(--bad);stroke-dasharray:1 4;fill:none;opacity:.75}
.mark-good{stroke:var(--good);stroke-dasharray:1 4;fill:none;opacity:.75}
.back{stroke:var(--good);stroke-width:2;fill:none;stroke-linecap:round;stroke-linejoin:round}
.over{fill:var(--ghost)}
.badge circle{fill:var(--bad)}.badge.good circle{fill:var(--good)}
.badge text{fill:var(--card);font-weight:700;font-size:11.5px}
.h0{fill:var(--h0)}.h1{fill:var(--h1)}.h2{fill:var(--h2)}.h3{fill:var(--h3)}
.h4{fill:var(--h4)}.h5{fill:var(--h5)}.h6{fill:var(--h6)}
.hatched{fill:url(#stripes)}.stripe-back{fill:var(--stripeback)}
.stripe{stroke:var(--stripe);stroke-width:2.4}
"""

PATTERNED = """
path.h0,.legend rect.h0{fill:url(#p0)}path.h1,.legend rect.h1{fill:url(#p1)}
path.h2,.legend rect.h2{fill:url(#p2)}
.on{stroke:var(--card);stroke-width:.9;fill:none}.dot{fill:var(--ink);opacity:.65}
.u-productive{fill:var(--loss)}.u-lost{fill:url(#lost)}.u-recovering{fill:url(#recovering)}
.u-waiting{fill:url(#waiting)}.lost-back{fill:var(--ghost)}.recovering-back{fill:var(--bad)}
.waiting-back{fill:var(--line)}.bracket{stroke:var(--soft);fill:none}
.badge rect{fill:var(--bad)}.badge.good rect{fill:var(--good)}
table.time svg{width:14px;height:14px;display:inline-block;margin:0 8px -2px 0}
table.time td:nth-child(n+3){text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
table.time th:nth-child(n+3){text-align:right}table.time .part th{padding-left:22px}
table.time td:nth-child(2){color:var(--soft)}
"""
"""Beside the charts' own: patterns for trouble and uses of time."""

PAGE = (
    f":root{{color-scheme:light dark;{LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    + CHART
    + PATTERNED
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 18px 60px}
header{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline;margin-bottom:14px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:16px;margin:0 0 2px}
.sub{color:var(--soft);margin:0 0 8px;font-size:13.5px}
.state{font-weight:650;padding:1px 10px;border-radius:20px;background:var(--chip);font-size:13.5px}
.state.succeeded{color:var(--good)}.state.failed{color:var(--bad)}.state.paused{color:var(--warn)}
.lead{margin:0 0 16px;font-size:16px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:16px 18px;margin:0 0 16px}
.tiles{display:flex;flex-wrap:wrap;gap:1px;background:var(--line);padding:0;overflow:hidden}
.tile{background:var(--card);padding:12px 16px;flex:1 1 150px}
.tile b{display:block;font-size:21px;font-weight:650;font-variant-numeric:tabular-nums;
letter-spacing:-.01em}
.tile span{color:var(--soft);font-size:12.5px}
svg{display:block;width:100%;height:auto}
svg.defs{position:absolute;width:0;height:0}.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;color:var(--soft);font-size:12.5px;margin:8px 0 0}
.legend span{display:inline-flex;align-items:center;gap:6px}
.legend svg{width:22px;height:12px;flex:none}
article{border-top:1px solid var(--line);padding:14px 0;display:grid;
grid-template-columns:30px 1fr;gap:0 10px}
article:first-of-type{border-top:0}article:last-of-type{padding-bottom:0}
.num{width:24px;height:24px;border-radius:50%;background:var(--bad);color:var(--card);
font-weight:700;font-size:13px;display:grid;place-items:center}
.num.good{background:var(--good)}
article h3{font-size:15px;margin:0}
h3.chart{font-size:14px;font-weight:600;margin:18px 0 2px}
article p{margin:4px 0;overflow-wrap:anywhere}
.when{color:var(--soft);font-weight:400;font-size:13px}
.done,.undone{color:var(--good);font-weight:650}
.undone{color:var(--bad)}
dl.facts{display:flex;flex-wrap:wrap;gap:6px;margin:8px 0 4px}
dl.facts div{background:var(--chip);border-radius:6px;padding:1px 8px;font-size:13px}
dt,dd{display:inline;margin:0}dt{color:var(--soft)}dt:after{content:" "}
dd{font-variant-numeric:tabular-nums}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
details{margin-top:6px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{color:var(--soft);font-weight:500}td.num-cell{font-variant-numeric:tabular-nums}
tr:last-child td,tr:last-child th{border-bottom:0}
pre{margin:8px 0 0;font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,monospace;overflow-x:auto}
footer{color:var(--soft);font-size:12.5px}
@media(max-width:640px){main{padding:16px 10px 40px}section{padding:13px 12px}.tiles{padding:0}
.wide{display:none}.narrow{display:block}h1{font-size:21px}.tile{padding:9px 12px;flex-basis:120px}
.tile b{font-size:18px}table.time td:nth-child(2){display:none}
table.time th:nth-child(2){display:none}th,td{padding-right:8px;overflow-wrap:anywhere}
table:not(.time) tr>th:first-child:nth-last-child(2){width:52%}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
)

PICTURE = (
    f"svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}"
    + CHART
    + ".paper{fill:var(--card);stroke:var(--line)}.title{font-size:15px;font-weight:650}"
    + ".call{font-size:12.5px}.call.bad{fill:var(--bad);font-weight:650}"
    + ".call.good{fill:var(--good);font-weight:650}"
)
