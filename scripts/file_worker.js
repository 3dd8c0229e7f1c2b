// How does a page without a server search? Browsers start no worker for a file://, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #waiting = [];
    #frame = document.createElement("iframe");

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
      inside.postMessage = (data) => window.dispatchEvent(new MessageEvent("message", { data, source: inside }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.addEventListener("load", () => {
        for (const data of this.#waiting.splice(0)) this.#deliver(data);
        this.#waiting = null;
      });
      inside.document.body.append(script);
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.#deliver(data);
    }

    terminate() {
      this.#frame.remove();
    }

    #deliver(data) {
      const message = new MessageEvent("message", { data });
      this.#frame.contentWindow.dispatchEvent(message);
    }
  };
}
