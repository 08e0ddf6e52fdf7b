// A table that is wider than its column, or on a phone, shows each row as a block, with the headings before the cells.
function stackWideTables() {
    for (const table of document.querySelectorAll(".bd-article table.table")) {
        table.classList.remove("stacked");
        if (window.innerWidth < 600 || table.scrollWidth > table.clientWidth + 1) table.classList.add("stacked");
    }
}

for (const table of document.querySelectorAll(".bd-article table.table")) {
    const headings = [...table.querySelectorAll("thead th")].map((heading) => heading.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
        [...row.cells].forEach((cell, place) => {
            cell.dataset.heading = (headings.length > 2 && headings[place]) || "";
            cell.classList.toggle("empty", !cell.textContent.trim() && !cell.querySelector("img"));
        });
    }
}
stackWideTables();
document.fonts.ready.then(stackWideTables);
window.addEventListener("resize", stackWideTables);
// A table in a closed part of the page has no width yet.
for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", stackWideTables);

// On a phone, a picture whose words would be too small scrolls sideways, at 0.6 of its own size.
window.addEventListener("load", () => {
    if (window.innerWidth >= 600) return;
    for (const picture of document.querySelectorAll(".bd-article img")) {
        const width = 0.6 * picture.naturalWidth;
        if (picture.closest(".sd-card, .sphx-glr-thumbnails") || width < 1.15 * picture.clientWidth) continue;
        const box = document.createElement("div");
        box.className = "sideways";
        picture.replaceWith(box);
        box.append(picture);
        picture.style.width = `${width}px`;
    }
});

// A click on a picture that is shown smaller than it is opens it alone.
for (const picture of document.querySelectorAll(".bd-article img")) {
    if (picture.closest("a, .sd-card")) continue;
    picture.classList.add("opens");
    picture.addEventListener("click", () => window.open(picture.src));
}

// Long names of the reference break after a dot or an underscore.
for (const link of document.querySelectorAll(".bd-sidebar-primary nav a, .bd-sidebar-secondary nav .pre")) {
    if (!link.children.length) link.innerHTML = link.innerHTML.replace(/[._](?=\w)/g, "$&<wbr>");
}
