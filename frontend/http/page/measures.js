"use strict";
// How the live view writes what it measures.

const percent = (part, whole) => whole ? `${Math.round(100 * part / whole)} %` : "0 %";
const milliseconds = (value) => `${value.toFixed(value < 10 ? 2 : 0)} ms`;
const duration = (s) => s < 60 ? `${s.toFixed(s < 10 ? 1 : 0)} s` : s < 3600 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
const size = (bytes) => bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${Math.round(bytes / 1e6)} MB`;
const count = (value) => Math.round(value).toLocaleString("en");
