/* Browsers start no workers in pages that are opened from a folder. There the search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const address = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.scope = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const scope = frame.contentWindow;
          const load = (source) => new Promise((done) => {
            const script = scope.document.createElement("script");
            script.src = new URL(source, address);
            script.addEventListener("load", done);
            scope.document.head.append(script);
          });
          // What a worker finds in its global scope: messages to the page, and scripts to add.
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          scope.importScripts = (...sources) => sources.reduce((last, one) => last.then(() => load(one)), Promise.resolve());
          load(address).then(() => resolve(scope));
        }, { once: true });
      });
      frame.srcdoc = "<!doctype html><title>search</title>";
      const attach = () => document.body.append(frame);
      document.body ? attach() : document.addEventListener("DOMContentLoaded", attach);
    }
    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
