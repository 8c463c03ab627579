// The lint of the page's modules (src/regard/inspect/page/view): `.ci/run` fetches eslint by npm.

const browser = [
  ...["document", "window", "location", "history", "performance", "getComputedStyle", "matchMedia", "devicePixelRatio"],
  ...["innerHeight", "scrollTo", "scrollY", "requestAnimationFrame", "setTimeout", "clearTimeout", "atob"],
  ...["Blob", "DecompressionStream", "ImageData", "ResizeObserver", "Response", "URL", "URLSearchParams"],
];

export default [
  {
    files: ["**/*.js"],
    languageOptions: {
      ecmaVersion: 2023,
      sourceType: "module",
      globals: Object.fromEntries(browser.map((name) => [name, "readonly"])),
    },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: Object.fromEntries(
      [
        ...["no-undef", "no-unused-vars", "no-redeclare", "no-const-assign", "no-import-assign", "no-self-assign"],
        ...["no-dupe-keys", "no-dupe-args", "no-duplicate-imports", "no-unreachable", "no-sparse-arrays"],
        ...["no-unsafe-finally", "no-unsafe-negation", "no-unused-labels", "no-var", "prefer-const", "eqeqeq"],
        ...["use-isnan", "valid-typeof", "no-eval", "no-implied-eval", "no-new-func"],
      ].map((rule) => [rule, "error"]),
    ),
  },
];
