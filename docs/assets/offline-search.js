// Search from a folder, without a server: browsers start no worker from a file, so a hidden frame runs its script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><title>search</title>")
      inside.document.close()
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.onload = resolve
        script.onerror = reject
        script.src = url
        inside.document.body.append(script)
      })
      this.inside = inside
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
