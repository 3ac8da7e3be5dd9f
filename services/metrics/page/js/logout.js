// The button that ends the session which a login began; hidden where there was none.

const LOGGED_IN = "fulcrum_logged_in=1"; // beside the session's own cookie, which no script can read

export function offerLogout() {
  const button = document.getElementById("logout");
  button.hidden = !document.cookie.split("; ").includes(LOGGED_IN);
  button.addEventListener("click", async () => {
    await fetch("logout", { method: "POST" });
    location.assign("login");
  });
}
