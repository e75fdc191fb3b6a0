//! Tables in columns as wide as their cells, for a terminal of 80 columns.

/// The widest line. One that is wider would wrap on a usual terminal, often inside a number.
const WIDTH: usize = 80;
const BETWEEN: &str = "  ";

/// Lines of cells under their heads. Columns of numbers end in line, those of text begin in line. Columns that do not
/// fit beside the others follow in lines of their own, under the first column again. Only text in the last column makes
/// a line wider: what wraps there is the end of a name.
pub fn columns(heads: &[&str], rows: &[Vec<String>]) -> String {
    let is_text: Vec<bool> = (0..heads.len())
        .map(|column| !rows.is_empty() && rows.iter().all(|row| !row[column].starts_with(|c: char| c.is_ascii_digit())))
        .collect();
    let widths: Vec<usize> = (0..heads.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            let name_at_the_end = is_text[column] && column + 1 == heads.len();
            cells.filter(|_| !name_at_the_end).fold(heads[column].chars().count(), usize::max)
        })
        .collect();
    let mut text = String::new();
    for part in parts(&widths) {
        if !text.is_empty() {
            text.push('\n');
        }
        let line = |cell: &dyn Fn(usize) -> String| {
            let cells = part.iter().map(|&column| match (cell(column), widths[column], is_text[column]) {
                (cell, width, true) => format!("{cell:<width$}"),
                (cell, width, false) => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join(BETWEEN).trim_end().to_owned() + "\n"
        };
        text += &line(&|column| heads[column].to_owned());
        rows.iter().for_each(|row| text += &line(&|column| row[column].clone()));
    }
    text
}

/// The columns of each part: the first one, and as many others as fit.
fn parts(widths: &[usize]) -> Vec<Vec<usize>> {
    let mut parts = vec![vec![0]];
    let mut used = widths[0];
    for (column, width) in widths.iter().enumerate().skip(1) {
        used += BETWEEN.len() + width;
        if used > WIDTH && parts.last().is_some_and(|part| part.len() > 1) {
            parts.push(vec![0]);
            used = widths[0] + BETWEEN.len() + width;
        }
        parts.last_mut().expect("there is a first one").push(column);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| (*cell).to_owned()).collect()
    }

    #[test]
    fn numbers_end_in_line_and_names_begin_in_line() {
        let rows = [row(&["host", "7", "/a"]), row(&["disk", "1200", "/b c"])];
        assert_eq!(columns(&["tier", "hits", "path"], &rows), "tier  hits  path\nhost     7  /a\ndisk  1200  /b c\n");
    }

    #[test]
    fn no_line_wraps_inside_a_number_at_80_columns() {
        let heads = ["tier", "hits", "resident", "slots", "evictions", "refused", "bytes in", "bytes out"];
        let big = u64::MAX.to_string();
        let rows = [[vec!["host".to_owned()], vec![big.clone(); 7]].concat()];
        let text = columns(&heads, &rows);
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert_eq!(text.matches(&big).count(), 7, "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("tier")).count(), 3, "its name in each part: {text}");
    }

    #[test]
    fn a_long_name_at_the_end_moves_no_number() {
        let name = "n".repeat(300);
        let text = columns(&["client", "requests", "space"], &[row(&["1", "2", &name])]);
        assert_eq!(text, format!("client  requests  space\n     1         2  {name}\n"));
    }
}
