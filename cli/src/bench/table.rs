//! A table as text or as JSON.

use serde_json::{Value, json};

use crate::{columns::columns, failure::Failure, output::emit, size::show_bytes};

/// Rows of cells under a heading, printed as text or as JSON. Whole numbers in a column whose name ends in `bytes` are
/// sizes: text shows them with a unit, JSON as they are.
pub struct Table {
    title: String,
    columns: Vec<&'static str>,
    rows: Vec<Vec<Value>>,
}

impl Table {
    /// An empty table.
    pub fn new(title: impl Into<String>, columns: Vec<&'static str>) -> Self {
        Table { title: title.into(), columns, rows: Vec::new() }
    }

    /// Adds a row: as many cells as there are columns.
    pub fn row(&mut self, cells: Vec<Value>) {
        assert_eq!(cells.len(), self.columns.len(), "{}", self.title);
        self.rows.push(cells);
    }

    /// The table as an object.
    pub fn object(&self) -> Value {
        let row = |cells: &Vec<Value>| {
            let cells = self.columns.iter().zip(cells).map(|(name, cell)| (key(name), cell.clone()));
            Value::Object(cells.collect())
        };
        json!({ "title": self.title, "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }

    fn text(&self) -> String {
        let shown = |(column, cell): (&&str, &Value)| match cell {
            Value::Number(bytes) if column.ends_with("bytes") && bytes.is_u64() => {
                show_bytes(bytes.as_u64().unwrap_or(0))
            }
            Value::String(text) => text.clone(),
            Value::Number(number) if number.is_f64() => format!("{:.2}", number.as_f64().unwrap_or(f64::NAN)),
            Value::Null => "-".into(),
            other => other.to_string(),
        };
        let rows: Vec<Vec<String>> =
            self.rows.iter().map(|row| self.columns.iter().zip(row).map(shown).collect()).collect();
        format!("{}\n{}", self.title, columns(&self.columns, &rows))
    }
}

/// Prints tables: as text, or as one JSON object.
pub fn print(tables: &[Table], json: bool) -> Result<(), Failure> {
    emit(&if json {
        format!("{:#}\n", json!({ "tables": tables.iter().map(Table::object).collect::<Vec<_>>() }))
    } else {
        tables.iter().map(|table| table.text() + "\n").collect()
    })
}

/// The key of a column in JSON: `MiB/s` is `mib_per_s`.
fn key(column: &str) -> String {
    column.to_lowercase().replace('/', "_per_").replace([' ', '-'], "_")
}
